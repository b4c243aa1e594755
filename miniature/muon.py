"""Muon for the matrices of the layers and AdamW for all other weights, as one optimiser."""

from collections.abc import Sequence
from typing import Any

import torch

from refusion_eval.training.config import OptimisationConfig


class MuonAdamW(torch.optim.Optimizer):
    """Orthogonalised momentum for matrices (Jordan et al. 2024), AdamW for embeddings, output layer and norms.

    Both have one learning rate: the steps of Muon are scaled to the size of AdamW's (Liu et al. 2025, section 2.2).
    """

    def __init__(
        self,
        matrices: Sequence[torch.Tensor],
        groups: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        **adamw: Any,
    ) -> None:
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(list(matrices), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, lr=lr, **adamw),
        )
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Lets both parts work on the groups and the states of the whole, which a schedule and a checkpoint change."""
        first, *others = self.param_groups
        for part, groups in zip(self._parts, ([first], others), strict=True):
            part.param_groups, part.state = groups, self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of a checkpoint, which replaces groups and states of the whole."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the Trainer passes no closure
        """One step of both parts."""
        assert closure is None, "the gradients have to be there already"
        for part in self._parts:
            part.step()


def muon(model: torch.nn.Module, config: OptimisationConfig) -> MuonAdamW:
    """The optimiser of a model whose layers are in a list named `layers`, as in transformers."""
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    matrices = [weight for name, weight in trained if weight.ndim == 2 and ".layers." in name]
    tables = [weight for name, weight in trained if weight.ndim == 2 and ".layers." not in name]
    vectors = [weight for _, weight in trained if weight.ndim != 2]
    return MuonAdamW(
        matrices,
        [{"params": tables, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
    )
