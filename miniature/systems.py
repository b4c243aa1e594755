"""The systems whose frontiers are measured, and the settings that are tried for each family of checkpoints."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refusion_eval.results.measurement import MERGED, VERIFIER

_THRESHOLDS = (0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class System:
    """A system of the frontier.

    Attributes:
        model: name of the checkpoint.
        decoder: name of the decoder.
        name: the system's name in tables and figures.
        grid: settings that are tried, as dictionaries without what all systems share.
        variant: the variant of the decoder that the whole grid is of, as tables name it; such a system runs with the
            settings that were chosen for the plain one, so that a difference between the two is that of the variant.
        most_draws: the most draws that it is measured on, for a system whose every forward computes the whole sequence.
    """

    model: str
    decoder: str
    name: str
    grid: Sequence[Mapping[str, Any]]
    variant: str = ""
    most_draws: int | None = None

    @property
    def series(self) -> str:
        """What the style of the system is known by in all figures."""
        system = self.model if self.decoder == "autoregressive" else self.decoder
        return f"{system}+{self.variant}" if self.variant else system


def products(**values: Sequence[Any]) -> list[dict[str, Any]]:
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


def _refusion(blocks_of_slot: Mapping[int, Sequence[int]], tau_tokens: Sequence[float]) -> list[dict[str, Any]]:
    """Slots and blocks with all thresholds; in blocks of one slot tau_slot changes nothing, so one value is enough."""
    return [
        {"slot_size": slot, "block_size": block, "fuse": False} | taus
        for slot, blocks in blocks_of_slot.items()
        for block in blocks
        for taus in products(tau_slot=(0.6, 0.9) if block > slot else (0.9,), tau_token=tau_tokens)
    ]


def _in_reading_order(blocks_of_slot: Mapping[int, Sequence[int]]) -> list[dict[str, Any]]:
    """ReFusion from left to right: slot by slot in its largest blocks, and token by token."""
    slots = [
        {"slot_size": slot, "block_size": max(blocks), "fuse": False, "order": "left_to_right", "tau_token": tau_token}
        for slot, blocks in blocks_of_slot.items()
        for tau_token in (0.4, 0.9)
    ]
    return [*slots, *({"slot_size": slot, "fuse": False, "serial": True} for slot in blocks_of_slot)]


# Name of a system in tables and figures -> its checkpoint, its decoder, and of which variant of that its grid is.
_SYSTEMS = {
    "AR-SFT": ("autoregressive_sft", "autoregressive", ""),
    "BD3-LM": ("bd3lm", "bd3lm", ""),
    "BD3-LM, merged": ("bd3lm", "bd3lm", MERGED),
    "LLaDA": ("llada", "llada", ""),
    "LLaDA w/ Fast-dLLM": ("llada", "fast_dllm_llada", ""),
    "ReFusion": ("refusion", "refusion", ""),
    "ReFusion, verifier": ("refusion", "refusion", VERIFIER),
    "I-DLM": ("idlm", "idlm", ""),
    "WeDLM": ("wedlm", "wedlm", ""),
}
_MOST_DRAWS = {"LLaDA": 40}
_GREEDY = ({"temperature": 0.0},)


def _with_grids(grids: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[System, ...]:
    """The systems of these names, each with its grid."""
    named = ((name, *_SYSTEMS[name], grid) for name, grid in grids.items())
    return tuple(
        System(
            model=model,
            decoder=decoder,
            name=name,
            grid=grid,
            variant=variant,
            most_draws=_MOST_DRAWS.get(name),
        )
        for name, model, decoder, variant, grid in named
    )


def systems(
    *,
    gen_length: int,
    bd3lm_blocks: Sequence[int],
    llada_blocks: Sequence[int],
    fast_dllm_blocks: Sequence[int],
    wedlm_windows: Sequence[int],
    refusion_blocks: Mapping[int, Sequence[int]],
) -> tuple[System, ...]:
    """The systems of a family, with their variants.

    Args:
        gen_length: tokens that every system may write.
        bd3lm_blocks: block lengths of BD3-LM.
        llada_blocks: block lengths of LLaDA, each tried at one, two and four tokens a forward.
        fast_dllm_blocks: block lengths of Fast-dLLM.
        wedlm_windows: window sizes of WeDLM.
        refusion_blocks: slot size -> block sizes.
    """
    steps = (gen_length, gen_length // 2, gen_length // 4)
    block_diffusion = {"block_length": bd3lm_blocks, "threshold": (None, 0.3, 0.45, *_THRESHOLDS, 0.99)}
    verifier = [point | {"completion": "verifier"} for point in _refusion(refusion_blocks, (0.4, 0.9))]
    return _with_grids(
        {
            "AR-SFT": _GREEDY,
            "BD3-LM": products(**block_diffusion, separate_commit=(True,)),
            "BD3-LM, merged": products(**block_diffusion, separate_commit=(False,)),
            "LLaDA": products(block_length=llada_blocks, steps=steps),
            "LLaDA w/ Fast-dLLM": products(block_length=fast_dllm_blocks, threshold=_THRESHOLDS, cache=("dual",)),
            "ReFusion": [*_refusion(refusion_blocks, (0.2, 0.4, 0.6, 0.9)), *_in_reading_order(refusion_blocks)],
            "ReFusion, verifier": verifier,
            # Greedy, so that the tokens are those of the next-token head whatever the stride is.
            "I-DLM": products(gen_block_size=range(1, 9), temperature=(0.0,)),
            "WeDLM": products(
                window_size=wedlm_windows,
                entropy_threshold=(None, 0.05, 0.1, 0.2, 0.4),
                pos_penalty_factor=(0.0, 0.02),
            ),
        }
    )


NUM_EQUAL = 8  # settings


def equally_tuned(*, refusion_block: int, llada_blocks: Sequence[int]) -> tuple[System, ...]:
    """Systems with `NUM_EQUAL` settings each, but AR-SFT with one, for comparisons that tune all systems equally.

    Args:
        refusion_block: the block size of ReFusion that is tried beside blocks of one slot.
        llada_blocks: the two block lengths of LLaDA with Fast-dLLM.
    """
    refusion = [
        {"slot_size": slot, "block_size": block, "fuse": False, "tau_slot": 0.9, "tau_token": tau_token}
        for slot in (8, 16)
        for block in (slot, refusion_block)
        for tau_token in (0.4, 0.9)
    ]
    bd3lm = products(block_length=(8, 16), threshold=(0.45, 0.6, 0.8, 0.95), separate_commit=(False,))
    llada = products(block_length=llada_blocks, threshold=(0.6, 0.8, 0.9, 0.95), cache=("dual",))
    wedlm = products(window_size=(8, 16), entropy_threshold=(0.05, 0.1, 0.2, 0.4), pos_penalty_factor=(0.02,))
    return _with_grids(
        {
            "AR-SFT": _GREEDY,
            "ReFusion": refusion,
            "ReFusion, verifier": [point | {"completion": "verifier"} for point in refusion],
            "BD3-LM, merged": bd3lm,
            "LLaDA w/ Fast-dLLM": llada,
            "I-DLM": products(gen_block_size=range(1, NUM_EQUAL + 1), temperature=(0.0,)),
            "WeDLM": wedlm,
        }
    )
