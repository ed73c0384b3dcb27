"""The built-in recurrent policy, with TorchRL's conventions for recurrent states. Built by `zoo.lstm`."""

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from cormorant_worker.policy.networks import ActionHeads, VectorEncoder
from cormorant_worker.spaces import Space


class RecurrentPolicy(TensorDictModuleBase):
    """encoder -> linear -> LSTM cell -> heads; states travel as `recurrent_state_h` and `recurrent_state_c`.

    Reads `observation`, `is_init` `[n, 1]` and the states `[n, hidden]`; writes `action` and `("next", states)`. A row
    whose `is_init` is set starts from zero states, whatever it is given.
    """

    def __init__(self, encoder: VectorEncoder, hidden: int, action_space: Space, *, return_log_prob: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.body = nn.Sequential(nn.Linear(encoder.num_features, hidden), nn.Tanh())
        self.cell = nn.LSTMCell(hidden, hidden)
        self.heads = ActionHeads(hidden, action_space)
        self.hidden = hidden
        self._return_log_prob = return_log_prob
        states = ["recurrent_state_h", "recurrent_state_c"]
        self.in_keys = ["observation", "is_init", *states]
        self.out_keys = ["action", *(["action_log_prob"] if return_log_prob else []), *[("next", s) for s in states]]

    def initial_state(self, batch_size: int) -> dict[str, Tensor]:
        """Zero states `[batch_size, hidden]` float32."""
        zeros = torch.zeros(batch_size, self.hidden)
        return {"recurrent_state_h": zeros, "recurrent_state_c": zeros.clone()}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act on a TensorDict `[n]`, writing into it."""
        going_on = (~tensordict["is_init"]).to(torch.float32)
        states = tensordict["recurrent_state_h"] * going_on, tensordict["recurrent_state_c"] * going_on
        h, c = self.cell(self.body(self.encoder(tensordict["observation"])), states)
        params = self.heads(h)
        action = self.heads.act(params)
        tensordict["action"] = action
        if self._return_log_prob:
            tensordict["action_log_prob"] = self.heads.log_prob(params, action)
        tensordict["next", "recurrent_state_h"] = h
        tensordict["next", "recurrent_state_c"] = c
        return tensordict
