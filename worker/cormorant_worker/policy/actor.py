"""Loading a policy, and acting: observations in, actions out, as numpy arrays of this process. One call per step.

`PolicyActor` calls the user's policy; `RandomActor` (random_actor.py) draws from the action space. One dry run at the
start finds the policy's other outputs, so that the hot loop knows every array in advance.

# n rows (environments that act now)
"""

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
import torch

from cormorant_worker.entrypoints import load_object
from cormorant_worker.errors import PolicyError, PolicyLoadError, PolicyMismatch
from cormorant_worker.policy.action_check import ActionCheck
from cormorant_worker.policy.normalizer import Normalizer
from cormorant_worker.spaces import Array, Arrays, Key, Leaf, Space, flatten, leaves, put_nested, unflattener

Acting = Callable[..., Any]

MAIN_MODEL = "policy"


@dataclass(frozen=True, slots=True)
class PolicyModels:
    """A factory's result: the callable that computes actions, and the modules that take weights, by name."""

    acting: Acting
    modules: Mapping[str, torch.nn.Module] = field(default_factory=dict)


def load_policy(entrypoint: str, kwargs: Mapping[str, Any], observation: Space, action: Space) -> PolicyModels:
    """Import a factory, "package.module:attribute", and build the policy for an environment's spaces. It returns

    - a TensorDictModule (tensordict's or TorchRL's): reads and writes batch keys;
    - a torch module or a plain callable: takes the observation (a tensor `[n, ...]`, nested like the space) and returns
      the action, or a mapping with "action" and whatever else is to be stored;
    - a mapping of named modules with "policy" among them: that one acts, all of them take published weights.
    """
    factory = load_object(entrypoint, what="policy")
    try:
        made = factory(observation, action, **kwargs)
    except Exception as error:  # the user's own code: whatever it raises is reported as its failure
        raise PolicyLoadError(
            f"the policy factory {entrypoint} raised {type(error).__name__}: {error} "
            f"(called with observation_space={observation}, action_space={action}, kwargs={dict(kwargs)})"
        ) from error
    return wrap_policy(made, entrypoint)


def wrap_policy(made: object, source: str) -> PolicyModels:
    """Split a factory's result into the acting callable and the modules that take weights."""
    if isinstance(made, Mapping):
        modules = {str(name): module for name, module in made.items() if isinstance(module, torch.nn.Module)}
        if set(modules) != {str(name) for name in made} or MAIN_MODEL not in modules:
            raise PolicyLoadError(
                f"{source} returned a mapping with {sorted(map(str, made))}; all values must be torch modules and one "
                f'of them must be named "{MAIN_MODEL}"'
            )
        return PolicyModels(modules[MAIN_MODEL], modules)
    if isinstance(made, torch.nn.Module):
        return PolicyModels(made, {MAIN_MODEL: made})
    if callable(made) and not isinstance(made, type):
        return PolicyModels(made)
    raise PolicyLoadError(
        f"{source} returned {type(made).__name__}; return a TensorDictModule, a torch module, a callable, "
        f'or a mapping of modules with "{MAIN_MODEL}"'
    )


class Acted(NamedTuple):
    """Actions and outputs for n rows. Arrays belong to the receiver until the next `act`."""

    actions: Arrays
    """[n, ...] per leaf of the action space, in the space's dtypes."""
    outputs: Arrays = ()
    """[n, ...] each of `Actor.outputs`."""
    states: Arrays = ()
    """[n, ...] each of `Actor.states`, as they are after this step."""
    versions: Array | None = None
    """[n] int64, if not all rows were computed by the same policy version."""


class Actor(Protocol):
    outputs: tuple[Leaf, ...]
    """Outputs beside the action."""
    states: tuple[Leaf, ...]
    """Recurrent states: passed to the policy at the next step, zero (or the policy's initial value) at the first."""
    initial_states: Arrays
    """[1, ...] each of `states`, at the first step of a trajectory; behind them, further ones that are carried from
    step to step, too, and not stored."""
    device: torch.device
    """Device whose generator draws actions; the CPU if none does."""

    def act(self, obs: Arrays, states: Arrays, is_init: Array) -> Acted:
        """Choose actions for n rows: observations [n, ...] per leaf, states [n, ...], is_init [n] bool."""


class PolicyActor:
    """Calls a policy on its device. Observations are read in place: no copy on a CPU."""

    def __init__(
        self,
        models: PolicyModels,
        observation: Space,
        action: Space,
        *,
        device: torch.device,
        num_rows: int = 2,
    ) -> None:
        """Move the modules to the device, and find out by one dry run what the policy reads and writes. The run has as
        many observations as the policy will get at once, for policies that know how many environments there are. Raises
        PolicyError where the policy raised in it, and PolicyMismatch where its action does not fit the action space.
        """
        self.models = models
        self.device = device
        self.normalizer: Normalizer | None = None
        """Normalizes observations first; `observation` is then its space."""
        for module in models.modules.values():
            module.to(device)
        self._space = observation
        self._observation = leaves(observation, ("observation",))
        self._action = leaves(action, ("action",))
        self._check = ActionCheck(action)
        is_nested = isinstance(observation, gymnasium.spaces.Dict | gymnasium.spaces.Tuple)
        self._nest = unflattener(observation) if is_nested else (lambda tensors: tensors[0])
        self.outputs: tuple[Leaf, ...] = ()
        self.states: tuple[Leaf, ...] = ()
        self.initial_states: Arrays = ()
        self._state_dtypes: dict[Key, torch.dtype] = {}
        """States that the policy wants in a dtype that numpy does not have."""
        self.can_act_tensors = False
        """`act_tensors` stores the same numbers as `act`."""
        self.is_recorded = False
        """`act_tensors` may be recorded as a CUDA graph."""
        self._is_simple = False
        self._staging = Staging(device) if device.type == "cuda" else None
        # A TensorDictModule implies that tensordict is imported; plain policies do not pay for the import.
        self._tensordict = sys.modules.get("tensordict")
        self.reads_first = self._tensordict is not None and isinstance(
            models.acting, self._tensordict.nn.TensorDictModuleBase
        )
        """It is a TensorDictModule, which is told where episodes begin."""
        self._call = self._call_tensordict_module if self.reads_first else self._call_plain
        self._dry_run(num_rows)
        # One observation, one action, nothing else, on the CPU: the common case needs no dictionaries.
        self._is_simple = (
            isinstance(observation, gymnasium.spaces.Box)
            and len(self._action) == 1
            and not (self.outputs or self.states or self.reads_first)
            and device.type == "cpu"
        )

    def twin(self, instead: Mapping[int, torch.Tensor] | None = None) -> "PolicyActor":
        """An independent actor: copies everything that calls may change (buffers, attributes) and shares the
        parameters. `instead`: what the twin has in place of some tensors of the modules, by their ids. Raises
        PolicyError where the policy cannot be copied.
        """
        parameters = (part for module in self.models.modules.values() for part in module.parameters())
        shared = {id(part): part for part in parameters} | dict(instead or {})
        twin = copy.copy(self)
        try:
            twin.models = copy.deepcopy(self.models, shared)
        except Exception as error:
            raise PolicyError(
                f"the policy cannot be copied for an episode of its own: {type(error).__name__}: {error}; give its "
                "class a __deepcopy__, or keep what cannot be copied out of it"
            ) from error
        twin._call = twin._call_tensordict_module if twin.reads_first else twin._call_plain
        return twin

    def act(self, obs: Arrays, states: Arrays, is_init: Array) -> Acted:
        """Choose actions for n rows. The caller sets `no_grad` and the exploration type.

        Not `inference_mode`: the modules may be the learner's own, and it would leave tensors in them (lazy parameters,
        statistics) that no learner can train with.
        """
        if self.normalizer is not None:
            obs = self.normalizer(obs)
        if self._is_simple:
            result = self.models.acting(torch.from_numpy(obs[0]))
            if isinstance(result, _ARRAYS):
                return Acted((_to_numpy(result, self._action[0], len(is_init)),))
            tensors = self._written_by(_named(result))
        else:
            tensors = self._written_by(self._call(obs, states, is_init))
        arrays: Sequence[Any] = tensors if self._staging is None else self._staging.download(tensors)
        n = len(is_init)
        found = [_to_numpy(array, leaf, n) for array, leaf in zip(arrays, self._leaves, strict=True)]
        actions, outputs = len(self._action), len(self._action) + len(self.outputs)
        return Acted(tuple(found[:actions]), tuple(found[actions:outputs]), tuple(found[outputs:]))

    def act_tensors(
        self, obs: Sequence[torch.Tensor], states: Sequence[torch.Tensor], is_init: torch.Tensor
    ) -> list[torch.Tensor]:
        """Like `act`, for tensors on the policy's device, without the host. Returns actions, outputs and states in this
        order, in any dtype that can be stored; only if `can_act_tensors`.
        """
        if self.normalizer is not None:
            obs = self.normalizer.on_tensors(obs)
        written = self._written_by(self._call(obs, states, is_init))
        return [_fitted(tensor, leaf, len(is_init)) for tensor, leaf in zip(written, self._leaves, strict=True)]

    def stacked(self, chosen: Any) -> Arrays:
        """Actions and outputs, as they are stored, of what a policy returned for K steps at once, [K, N, ...]; only if
        `can_act_tensors`.
        """
        named: dict[Key, Any] = {("action",): chosen} if isinstance(chosen, np.ndarray) else dict(_flat(chosen))
        found = map(as_numpy, self._written_by(named))
        return tuple(
            array.reshape(*array.shape[:2], *leaf.shape).astype(leaf.dtype, copy=False)
            for array, leaf in zip(found, self._leaves, strict=True)
        )

    def _written_by(self, written: Mapping[Key, torch.Tensor]) -> list[torch.Tensor]:
        try:
            return [written[key] for key in self._written]
        except KeyError as missing:
            raise PolicyMismatch(
                f"the policy did not write {missing} in this step; it must write the same keys in every step"
            ) from missing

    def _call_plain(self, obs: Sequence[Any], states: Sequence[Any], is_init: Any) -> Mapping[Key, torch.Tensor]:
        return _named(self.models.acting(self._nest(self._tensors(obs))))

    def _call_tensordict_module(
        self, obs: Sequence[Any], states: Sequence[Any], is_init: Any
    ) -> Mapping[Key, torch.Tensor]:
        n = len(is_init)
        given: dict[str, Any] = {}
        *tensors, init = self._tensors((*obs, *states, is_init))
        for leaf, tensor in zip((*self._observation, *self.states), tensors, strict=True):
            dtype = self._state_dtypes.get(leaf.key, tensor.dtype)
            put_nested(given, leaf.key, tensor if tensor.dtype == dtype else tensor.to(dtype))
        given["is_init"] = init.unsqueeze(-1)
        assert self._tensordict is not None
        result = self.models.acting(self._tensordict.TensorDict(given, batch_size=[n], device=self.device))
        return dict(_flat(result))

    def _tensors(self, arrays: Sequence[Any]) -> list[torch.Tensor]:
        if isinstance(arrays[0], torch.Tensor):
            return list(arrays)
        if self._staging is not None:
            return self._staging.upload(arrays)
        return [torch.from_numpy(array) for array in arrays]

    def _dry_run(self, n: int) -> None:
        obs = samples(self._space, n)
        before = tuple(array.copy() for array in obs)
        first = np.ones(n, dtype=np.bool_)
        with torch.no_grad():
            self._find_states(obs, first)
            states = tuple(np.repeat(value, n, axis=0) for value in self.initial_states)
            written = self._try(obs, states, first)
        refuse_changed(obs, before)
        if missing := [".".join(leaf.key) for leaf in self._action if leaf.key not in written]:
            raise PolicyMismatch(
                f"the policy wrote {sorted('.'.join(key) for key in written)} but not {', '.join(missing)}"
            )
        actions = [as_numpy(written[leaf.key]) for leaf in self._action]
        if n == 1 and self.reads_first:  # TorchRL's environments take the only row without its dimension
            actions = [a[None] if a.shape == leaf.shape else a for a, leaf in zip(actions, self._action, strict=True)]
        self._check.fit(tuple(actions), n)
        known = {leaf.key for leaf in (*self._observation, *self._action, *self.states)}
        known |= {("next", *leaf.key) for leaf in self.states} | {("is_init",)}
        self.outputs = tuple(output_leaf(key, value, n) for key, value in written.items() if key not in known)
        self._leaves = (*self._action, *self.outputs, *self.states)
        # Other whole numbers are compared with what they were before the cast.
        self.can_act_tensors = all(
            leaf.dtype.kind == "f" or np.can_cast(given.dtype, leaf.dtype)
            for given, leaf in zip(actions, self._action, strict=True)
        )
        self._written: list[Key] = [leaf.key for leaf in (*self._action, *self.outputs)]
        self._written += [("next", *leaf.key) for leaf in self.states]

    def _find_states(self, obs: Arrays, first: Array) -> None:
        """Recurrent states by TorchRL's convention: the policy reads `state` and writes `("next", state)`."""
        acting: Any = self.models.acting
        if not self.reads_first:
            return
        reads = {_key(key) for key in acting.in_keys}
        carried = [_key(key)[1:] for key in acting.out_keys if _key(key)[0] == "next" and _key(key)[1:] in reads]
        if not carried:
            return
        initial = getattr(acting, "initial_state", None)
        if callable(initial):
            given: Mapping[Key, torch.Tensor] = dict(_flat(initial(1)))
            if missing := [".".join(key) for key in carried if key not in given]:
                raise PolicyMismatch(
                    f"initial_state(1) of the policy returned {sorted('.'.join(key) for key in given)} but not "
                    f"{', '.join(missing)}, which it carries from step to step; return a tensor [batch_size, ...] for "
                    "each"
                )
        else:
            try:
                written = self._try(obs, (), first)
            except PolicyError as error:
                names = ", ".join(".".join(key) for key in carried)
                raise PolicyError(
                    f"the policy carries {names} from step to step and cannot act without an initial value: {error}; "
                    "give it a method initial_state(batch_size) that returns the state at the start of an episode, a "
                    "tensor [batch_size, ...] for each of those keys"
                ) from error
            given = {key: torch.zeros_like(written["next", *key][:1]) for key in carried}
        self.states = tuple(output_leaf(key, given[key], 1) for key in carried)
        self._state_dtypes = {key: given[key].dtype for key in carried if given[key].dtype == torch.bfloat16}
        self.initial_states = tuple(as_numpy(given[key]) for key in carried)

    def _try(self, obs: Arrays, states: Arrays, first: Array) -> Mapping[Key, torch.Tensor]:
        try:
            return self._call(obs, states, first)
        except Exception as error:
            raise PolicyError(
                f"the policy raised {type(error).__name__} on observations of shape {[a.shape for a in obs]}: {error}"
            ) from error


_ARRAYS = (np.ndarray, torch.Tensor)
"""Types of a bare action that a policy returns; compiled policies return arrays."""


def _to_numpy(tensor: Any, leaf: Leaf, n: int) -> Array:
    array: Array = tensor if isinstance(tensor, np.ndarray) else as_numpy(tensor)
    if array.dtype != leaf.dtype:
        array = cast_to(leaf, array)
    return array if array.shape == (n, *leaf.shape) else _fitted(array, leaf, n)


def _fitted(values: Any, leaf: Leaf, n: int) -> Any:
    """Values [n, ...]; the only row may come without its dimension. Raises PolicyMismatch for any other shape."""
    shape = tuple(values.shape)
    if shape == (n, *leaf.shape):
        return values
    if n == 1 and shape == leaf.shape:
        return values[None]
    if shape[1:] != leaf.shape:
        raise PolicyMismatch(
            f"the policy's {'.'.join(leaf.key)} has shape {shape[1:]}, but {leaf.shape} in the first step"
        )
    raise _other_rows(leaf.key, shape, n)  # one of several would be broadcast to all of them where it is stored


def cast_to(leaf: Leaf, array: Array) -> Array:
    """Cast an array to a leaf's dtype. Raises PolicyMismatch where it is an integer that cannot hold the values."""
    cast: Array = array.astype(leaf.dtype)
    if leaf.dtype.kind in "iub" and not np.array_equal(cast, array):
        bad = array[cast != array]
        raise PolicyMismatch(
            f"the policy's {'.'.join(leaf.key)} is {array.dtype.name} with {bad[0]}, the environment expects whole "
            f"numbers ({leaf.dtype.name}); return class indices"
        )
    return cast


def refuse_changed(obs: Arrays, before: Arrays) -> None:
    """Raise PolicyMismatch where a policy wrote into the observations of its dry run."""
    if any(not np.array_equal(ours, theirs) for ours, theirs in zip(obs, before, strict=True)):
        raise PolicyMismatch(
            "the policy changes its observations in place, and thereby the stored batch; work on a copy "
            "(observation.clone(), or mul instead of mul_)"
        )


def output_leaf(key: Key, value: Any, n: int) -> Leaf:
    try:
        array = as_numpy(value)
    except TypeError as error:
        raise PolicyMismatch(
            f"the policy's {'.'.join(key)} is {getattr(value, 'dtype', type(value).__name__)}, which numpy does not "
            f"support ({error}); return it as float32"
        ) from error
    if array.shape[:1] != (n,):
        raise _other_rows(key, array.shape, n)
    return Leaf(key=key, shape=array.shape[1:], dtype=array.dtype)


def _other_rows(key: Key, shape: tuple[int, ...], n: int) -> PolicyMismatch:
    return PolicyMismatch(
        f"the policy's {'.'.join(key)} has shape {shape} for {n} environments; the first dimension must be {n}"
    )


def _key(key: str | tuple[str, ...]) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)


def _named(result: Any) -> Mapping[Key, torch.Tensor]:
    """The result of a plain policy, by key."""
    return {("action",): torch.as_tensor(result)} if isinstance(result, _ARRAYS) else dict(_flat(result))


def _is_nested(value: Any) -> bool:
    tensordict = sys.modules.get("tensordict")
    return isinstance(value, Mapping) or (tensordict is not None and isinstance(value, tensordict.TensorDictBase))


def _flat(value: Any, prefix: Key = ()) -> Iterable[tuple[Key, torch.Tensor]]:
    """Walk nested mappings and TensorDicts; private keys (a leading underscore) stay private, as in TorchRL."""
    if not _is_nested(value):
        raise PolicyMismatch(
            f'the policy returned {type(value).__name__}; return the action as a tensor, or a mapping with "action"'
        )
    for name, part in value.items():
        if str(name).startswith("_"):
            continue
        if _is_nested(part):
            yield from _flat(part, (*prefix, str(name)))
        else:
            yield (*prefix, str(name)), part


def samples(space: Space, n: int) -> Arrays:
    """Deterministic values of a space (zeros are not valid in every space)."""
    own = copy.deepcopy(space)
    own.seed(0)
    return tuple(np.stack(parts) for parts in zip(*(flatten(own, own.sample()) for _ in range(n)), strict=True))


class Staging:
    """Pinned memory between this process's arrays and a CUDA policy: both copies are asynchronous, one wait per step.

        numpy obs -> pinned -> device               (queued, the CPU goes on)
        device action, outputs -> pinned -> numpy   (queued; then wait for this stream's event, not for the device)

    While the CPU waits, the environments of the other EnvGroup step: see `collect/env_group.py`. Buffers of one actor,
    grown to the largest number of rows seen; used by one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(pinned, on the device), one pair an array."""
        self._down: list[torch.Tensor] = []
        """Pinned, one a tensor."""
        self._done = torch.cuda.Event()

    def upload(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Copy arrays [n, ...] to the device. The result is valid until the next `upload`."""
        uploaded = []
        for i, given in enumerate(map(torch.from_numpy, arrays)):
            if i == len(self._up) or not _fits(self._up[i][0], given):
                pinned = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
                self._up[i : i + 1] = [(pinned, torch.empty_like(pinned, device=self._device, pin_memory=False))]
            pinned, target = self._up[i]
            n = len(given)
            # The last upload has been read: its action came back before this step began.
            pinned[:n].copy_(given)
            uploaded.append(target[:n].copy_(pinned[:n], non_blocking=True))
        return uploaded

    def download(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        """Copy tensors [n, ...] from the device and wait for them. The result is valid until the next `download`."""
        arrays: list[Array] = []
        for i, given in enumerate(tensors):
            tensor = given.float() if given.dtype == torch.bfloat16 else given
            if i == len(self._down) or not _fits(self._down[i], tensor):
                self._down[i : i + 1] = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)]
            arrays.append(self._down[i][: len(tensor)].copy_(tensor.detach(), non_blocking=True).numpy())
        self._done.record(torch.cuda.current_stream(self._device))
        self._done.synchronize()
        return arrays


def _fits(buffer: torch.Tensor, given: torch.Tensor) -> bool:
    return buffer.dtype == given.dtype and buffer.shape[1:] == given.shape[1:] and len(buffer) >= len(given)


def device_of(policy: Any) -> torch.device:
    """Device of the first parameter of a policy or a mapping of modules; the CPU if there is none."""
    for module in policy.values() if isinstance(policy, Mapping) else (policy,):
        if isinstance(module, torch.nn.Module) and (first := next(module.parameters(), None)) is not None:
            return first.device
    return torch.device("cpu")


def as_numpy(value: object) -> Array:
    """Convert a tensor of any device, or anything else that numpy accepts, to an array. bfloat16, which numpy lacks,
    becomes float32; another dtype that it lacks is a TypeError.
    """
    if isinstance(value, torch.Tensor):
        # At 8 environments, a `detach` and a `cpu` that change nothing would be a tenth of a policy call.
        tensor = value if value.is_cpu and not value.requires_grad else value.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.asarray(value)
