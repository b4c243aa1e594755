"""Muon for the matrices of the layers and AdamW for all other weights, as one optimiser."""

from collections.abc import Iterable
from typing import Any

import torch

from refusion_eval.training.config import OptimisationConfig

MOMENTUM = 0.95
# The quintic iteration of Jordan et al. (2024): after five of them singular values lie between about 0.7 and 1.2.
ITERATIONS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for matrices (Jordan et al. 2024), with decoupled weight decay and Nesterov's momentum.

    `torch.optim.Muon` orthogonalises in bfloat16. A processor without such instructions emulates them at a thirtieth of
    the speed of float32, and one with them rounds otherwise. Here products are in float32, for all matrices of one
    shape at once.
    """

    def __init__(self, matrices: Iterable[torch.Tensor], *, lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step, whose size is that of AdamW's (Liu et al. 2025, section 2.2)."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    shapes.setdefault(weight.shape, []).append(weight)
            for shape, weights in shapes.items():
                directions = orthogonalised(torch.stack([self._momentum(weight) for weight in weights]))
                for weight, direction in zip(weights, directions, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(direction.to(weight.dtype), alpha=-group["lr"] * 0.2 * max(shape) ** 0.5)

    def _momentum(self, weight: torch.Tensor) -> torch.Tensor:
        """Adds the gradient to the running mean; returns Nesterov's mean of both."""
        assert weight.grad is not None
        buffer = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        buffer.lerp_(weight.grad, 1 - MOMENTUM)
        return weight.grad.lerp(buffer, MOMENTUM)


def orthogonalised(matrices_NRC: torch.Tensor) -> torch.Tensor:
    """N matrices of R rows and C columns with their singular values brought near 1, in float32."""
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    found = matrices_NRC.float()
    found = found.mT if tall else found
    found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp(min=1e-7)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), found, beta=linear)
    return found.mT if tall else found


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices, AdamW for embeddings, output layer and norms, with one learning rate for both."""

    def __init__(
        self,
        matrices: Iterable[torch.Tensor],
        groups: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        **adamw: Any,
    ) -> None:
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices, lr=lr, weight_decay=weight_decay),
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
