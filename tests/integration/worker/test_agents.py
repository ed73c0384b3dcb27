"""Environments of several agents, frame by frame against a plain loop; those of collectors are in `test_parties.py`."""

from pathlib import Path
from typing import Any

import envpool
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from cormorant_client import connect
from cormorant_testing.agents import Party, Rounds, halves
from cormorant_testing.placements.parties import GROUPS, PartyJob, PartyLoop
from cormorant_testing.serving import serve
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import EnvBuildError, EnvCrashed, ManifestError
from cormorant_worker.launch import load_job, make_collector, open_fleet
from cormorant_worker.sinks.reader import read_dataset
from manifest_making import Document, manifest

PARTY = "cormorant_testing.agents:Party"
ANY = PartyJob(absences="returns")


def job(*, num_envs: int = 3, collection: Document | None = None, **env: Any) -> Document:
    block = {"entrypoint": PARTY, "numEnvs": num_envs, "vectorization": "inline", **env}
    document = manifest("party", env={"pettingzoo": block})
    document["spec"]["collection"] = {"framesPerBatch": 60, "seed": 3, **(collection or {})}
    return document


@pytest.mark.slow
def test_inference_servers_act_on_frames_of_a_plain_loop() -> None:
    loop = PartyLoop(PartyJob(absences="returns", num_envs=2, total=240, workers=2))
    document = loop.job.manifest()
    document["spec"]["policy"] = {"entrypoint": "cormorant_testing.agents:halves"}
    document["spec"]["workerGroups"] = [{"name": "cpu"}, {"name": "server", "role": "inference", "replicas": 1}]
    with open_fleet(document, workers=2) as fleet:
        for batch in fleet.batches():
            loop.take(batch)
    assert (loop.frames, len(loop.streams)) == (240, 4)


def test_a_head_hands_out_frames_of_a_plain_loop(tmp_path: Path) -> None:
    loop = PartyLoop(PartyJob(absences="returns", ends="any", total=240))
    with (
        serve(load_job(loop.job.manifest()), directory=tmp_path) as served,
        connect(served.server.url, token=served.reader.token) as client,
    ):
        for delivery in client.deliveries(prefetch=0):
            loop.take(delivery.tensordict())
        exported = [line.split() for line in served.reader.get("/metrics").body.decode().splitlines()]
        acted = [float(line[1]) for line in exported if line[0].startswith("cormorant_agent_steps_total{")]
        assert acted == [loop.agent_steps]
    assert (loop.frames, len(loop.streams)) == (240, 3)


def test_a_dataset_has_frames_of_a_plain_loop(tmp_path: Path) -> None:
    loop = PartyLoop(PartyJob(absences="returns", num_envs=2, total=240))
    document = loop.job.manifest()
    document["spec"]["output"] = {"dataset": {"uri": str(tmp_path / "data")}}
    with open_fleet(document) as fleet:
        assert fleet.wait_until_done(120)
    (frames,) = read_dataset(str(tmp_path / "data")).frames(batch_size=240)
    whole = frames[frames["state"][:, 0].argsort(stable=True)].reshape(2, 120)
    whole.names = [None, "time"]
    assert loop.take(whole) == 240


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_the_team_reward_is_of_the_agents_that_act(kind: str) -> None:
    with make_collector(job(teamReward=kind)) as collector:
        batch = collector.collect(num_steps=90)
    total = sum(batch["next", group, "reward"].sum(-2) for group in GROUPS["byName"])
    acting = sum(batch[group, "mask"].sum(-1, keepdim=True) for group in GROUPS["byName"])
    torch.testing.assert_close(batch["next", "reward"], total / acting if kind == "mean" else total)


@pytest.mark.parametrize(
    ("field", "settings"), [("multiStep", {"steps": 2, "gamma": 0.9}), ("normalize", {"reward": {"gamma": 0.9}})]
)
def test_what_needs_one_reward_needs_the_teams(field: str, settings: Document) -> None:
    with pytest.raises(ManifestError, match=rf"{field}.* is about one reward.* or set env.pettingzoo.teamReward"):
        make_collector(job(collection={field: settings}))
    with make_collector(job(collection={field: settings}, teamReward="sum")) as collector:
        assert collector.collect(num_steps=90)["next", "reward"].any()


def test_a_module_reads_and_writes_the_keys_of_groups() -> None:
    parts = [
        TensorDictModule(
            lambda seen: (seen.sum(-1), seen[..., :2].float() * 0 + 1),
            in_keys=[(group, "observation")],
            out_keys=[(group, "value"), (group, "action")],
        )
        for group in GROUPS["byName"]
    ]
    with make_collector(env=ANY.manifest()["spec"]["env"], policy=TensorDictSequential(*parts)) as collector:
        batch = collector.collect(num_steps=90)
    assert PartyLoop(ANY).take(batch) == 90
    assert torch.equal(batch["red", "value"], batch["red", "observation"].sum(-1))


def test_a_callable_gets_nested_tensors() -> None:
    loop = PartyLoop(PartyJob(absences="deaths", num_envs=2))
    with open_fleet(env=Party, num_envs=2, policy_factory=halves, total_frames=256) as fleet:
        for batch in fleet.batches():
            loop.take(batch)
            assert [batch[group, "action"].unique().tolist() for group in GROUPS["byName"]] == [[1.5], [0.5], [1.0]]
    assert (loop.frames, len(loop.streams)) == (256, 2)


class Nested(Party):
    """An observation of two parts, and two choices in one action."""

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        told, did = (spaces.Box(0, 2.0**20, (n,), np.float32) for n in (3, 2))
        return spaces.Dict(told=spaces.Tuple([told]), did=did)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.MultiDiscrete([3, 2], start=[5, 9])

    def _look(self, did: Any) -> Any:
        return {agent: {"told": (seen[:3],), "did": seen[3:]} for agent, seen in super()._look(did).items()}


def test_nested_observations_and_several_choices_of_an_agent() -> None:
    with make_collector(env=Nested, num_envs=2) as collector:
        batch = collector.collect(num_steps=90)
    for name in GROUPS["byName"]:
        group, following, acts = batch[name], batch["next", name, "observation"], batch[name, "mask"]
        assert torch.equal(following["did"][acts], group["action"][acts].float())
        choices = [group["action"][acts][:, i].unique().tolist() for i in (0, 1)]
        assert choices == [[5, 6, 7], [9, 10]]
        steps = group["observation", "told", "0"][..., 2][acts]
        assert torch.equal(following["told", "0"][..., 2][acts], steps + 1)


class Unknown(Party):
    @property
    def agents(self) -> list[str]:
        return [*super().agents, "gray_0"]


class Unseen(Party):
    def _look(self, did: Any) -> Any:
        return {agent: seen for agent, seen in super()._look(did).items() if agent != "red_0"}


def zoo(**block: Any) -> Document:
    return {"pettingzoo": {"vectorization": "inline", **({} if "id" in block else {"entrypoint": PARTY}), **block}}


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (zoo(groupMap={"red": ["red_0", "red_1"]}), "groupMap has red_0, red_1, and the environment .*blue_0.*; write"),
        (zoo(entrypoint="cormorant_testing.agents:Unequal", groups="all"),
         r"the agents of the group agents have different spaces: blue_0 has .*; set groups to"),
        (zoo(groupMap={"red": ["red_0", "red_1"], "state": ["blue_0", "green_0", "green_1"]}),
         "a group is called state, as another key of batches; name it otherwise"),
        (zoo(entrypoint="cormorant_testing.envs:CountingEnv"),
         "CountingEnv. raised AttributeError: 'CountingEnv' object has no attribute 'possible_agents'"),
        (zoo(id="cormorant_testing/agents"), "'cormorant_testing.agents' has no attribute 'parallel_env'"),
        ({"gymnasium": {"entrypoint": PARTY}}, "not a gymnasium.Env; .* several agents in env.pettingzoo"),
        ({"envpool": {"taskId": "CartPole-v1", "groups": "perAgent"}}, "has a single player; remove groups"),
        ({"envpool": {"taskId": "TicTacToe-v1", "numEnvs": 4, "batchSize": 2}},
         "TicTacToe-v1 has 2 players and steps in lockstep; set batchSize: 0"),
        ({**zoo(numEnvs=2), "variants": [{"name": "a"}, {"name": "b", "kwargs": {"is_backward": True}}]},
         r"variant b\) has green_1, .*; environment 0 \(variant a\) has red_0, .*; make possible_agents agree"),
    ],
)  # fmt: skip
def test_what_fits_no_groups_is_refused(env: Document, sentence: str) -> None:
    with pytest.raises(EnvBuildError, match=sentence):
        make_collector(env=env)


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (Unknown, "has the agent gray_0, which possible_agents does not have"),
        (Unseen, "returned no observation of red_0, which is in its agents; return one, or take it out"),
    ],
)
def test_agents_that_do_not_appear_are_named(env: Any, sentence: str) -> None:
    with pytest.raises(EnvCrashed, match=sentence), make_collector(env=env) as collector:
        collector.collect(num_steps=10)


class Forgetful(Party):
    """Leaves agents in its list that have all ended."""

    _kept: tuple[str, ...] = ()

    @property
    def agents(self) -> list[str]:
        return [*self._kept] or super().agents

    def state(self) -> Any:
        return np.zeros(3, np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self._kept = ()
        return super().reset(seed=seed)

    def step(self, actions: Any) -> Any:
        found = super().step(actions)
        self._kept = () if super().agents else tuple(actions)
        return found


def test_an_episode_ends_with_its_agents_even_if_they_stay_listed() -> None:
    batches = []
    for env in (Party, Forgetful):
        with make_collector(env=env, num_envs=3) as collector:
            batches.append(collector.collect(num_steps=90).exclude("state", ("next", "state")))
    assert batches[0]["next", "done"].any()
    assert (batches[0] == batches[1]).all()


@pytest.mark.parametrize("vectorization", ["inline", "subprocess"])
def test_turns_are_those_of_pettingzoos_own_loop(vectorization: str) -> None:
    document = job(entrypoint="cormorant_testing.agents:Rounds", vectorization=vectorization, teamReward="sum")
    with make_collector(document) as collector:
        batch = torch.cat([collector.collect(num_steps=steps) for steps in (90, 3, 90)], dim=1)
        assert collector.env_restarts == 0
    assert batch["next", "done"].sum() > 5
    assert batch["next", "truncated"].any()
    assert (batch["player", "mask"].sum(-1) == 1).all()
    for row in batch:
        env = Rounds()
        env.reset(seed=int(row["player", "observation"][0, 0, 0]))
        earned, acted, frames = dict.fromkeys(env.possible_agents, 0.0), set[str](), iter(row)
        for frame in frames:
            if not env.agents:
                env.reset()
                earned = dict.fromkeys(env.possible_agents, 0.0)
            for agent in env.agent_iter():
                number = env.possible_agents.index(agent)
                seen, reward, terminated, truncated, _ = env.last()
                assert reward == earned[agent]
                if not (terminated or truncated):
                    break
                earned[agent] = 0.0
                env.step(None)
            acted.add(agent)
            assert frame["player", "mask"].nonzero().tolist() == [[number]]
            assert np.array_equal(frame["player", "observation"][number], seen["observation"])
            assert np.array_equal(frame["player", "action_mask"][number], seen["action_mask"])
            assert frame["player", "action_mask"].all(-1).sum() >= 3
            was_there = set(env.agents)
            earned[agent] = 0.0
            env.step(int(frame["player", "action"][number]))
            following = frame["next", "player"]
            for other, name in enumerate(env.possible_agents):
                earned[name] += float(following["reward"][other, 0])
                is_gone = name not in was_there or env.terminations[name]
                assert following["terminated"][other].item() == is_gone, (name, was_there)
                assert following["truncated"][other].item() == (name in was_there and env.truncations[name])
                if name in was_there:
                    assert np.array_equal(following["observation"][other], env.observe(name)["observation"])
            is_over = all(env.terminations[name] or env.truncations[name] for name in env.agents)
            assert frame["next", "done"].item() == is_over
            assert frame["next", "reward"].item() == pytest.approx(sum(env.rewards.values()))
            if is_over:
                while env.agents:
                    env.step(None)
        assert len(acted) == 4


@pytest.mark.parametrize("groups", ["agents", "perAgent"])
@pytest.mark.parametrize(("task", "players"), [("TicTacToe-v1", 2), ("KuhnPoker-v1", 2), ("SparrowMahjong-v1", 3)])
def test_games_of_envpool_are_those_of_a_plain_pool(task: str, players: int, groups: str) -> None:
    document = manifest(env={"envpool": {"taskId": task, "numEnvs": 4, "numThreads": 2}})
    names = [groups]
    if groups == "perAgent":
        document["spec"]["env"]["envpool"]["groups"] = groups
        names = [f"player_{number}" for number in range(players)]
    with make_collector(document) as collector:
        batch = torch.cat([collector.collect(num_steps=4 * steps) for steps in (40, 1, 60)], dim=1)
        seeds = WorkerPlace(seed=document["spec"]["collection"].get("seed", 0)).env_seeds(4)
    assert ("next", "reward") not in batch.keys(True)
    assert {key for key in batch.keys() if key not in ("next", "collector")} == {*names}  # noqa: SIM118
    for where in (batch, batch["next"]):
        every = {key: torch.cat([where[name, key] for name in names], 2) for key in where[names[0]].keys()}  # noqa: SIM118
        where["agents"] = TensorDict(every, batch.shape)
    for row, seed in zip(batch, seeds, strict=True):
        pool = envpool.make(task, env_type="gymnasium", num_envs=1, seed=[seed])
        seen, said = pool.reset()
        for frame in row:
            player, agents, following = int(said["current_player"][0]), frame["agents"], frame["next", "agents"]
            assert np.array_equal(agents["observation"], seen)
            assert agents["mask"].tolist() == [number == player for number in range(players)]
            assert np.array_equal(agents["action_mask"][player], said["legal_action_mask"][0])
            assert agents["action_mask"].all(-1).sum() >= players - 1
            assert said["legal_action_mask"][0, agents["action"][player]]
            seen, reward, terminated, truncated, said = pool.step(agents["action"][player : player + 1].int().numpy())
            assert np.array_equal(following["observation"], seen)
            assert np.array_equal(following["reward"][:, 0], reward)
            assert following["terminated"].tolist() == [[bool(terminated[0])]] * players
            assert following["truncated"].tolist() == [[bool(truncated[0])]] * players
            is_over = bool(terminated[0] or truncated[0])
            assert frame["next", "done"].tolist() == [is_over]
            if is_over:
                assert not following["mask"].any()
                seen, *_, said = pool.step(np.zeros(1, np.int32))  # its step that is only a reset
    assert batch["next", "done"].sum() > 10


def test_cars_of_intersection_act_at_once_in_one_group_or_one_each() -> None:
    def act(seen: Any) -> Any:
        chosen = {name: (10 * group["observation"].abs().sum((-1, -2))).long() % 3 for name, group in seen.items()}
        return {name: {"action": action} for name, action in chosen.items()}

    block = {"taskId": "IntersectionMultiAgent-v1", "numEnvs": 4}
    batches = []
    for groups in ({}, {"groups": "perAgent"}):
        with make_collector(env={"envpool": block | groups}, policy=act, seed=5) as collector:
            batches.append(collector.collect(num_steps=120))
    one, two = batches
    assert one["agents", "mask"].all()
    assert one["agents", "action"].shape == (4, 30, 2)
    assert (one["next", "agents", "done"] == one["next", "done"].unsqueeze(-1)).all()
    assert one["next", "done"].any()
    assert len(one["agents", "action"].unique()) == 3
    keys = set(one["agents"].keys())
    assert "action_mask" not in keys
    for key in keys:
        assert torch.equal(one["agents", key], torch.cat([two[f"player_{i}", key] for i in (0, 1)], 2))
        if key != "action":
            after = torch.cat([two["next", f"player_{i}", key] for i in (0, 1)], 2)
            assert torch.equal(one["next", "agents", key], after)
    assert torch.equal(one["next", "agents", "reward"][:, :, 1], two["next", "player_1", "reward"][:, :, 0])
