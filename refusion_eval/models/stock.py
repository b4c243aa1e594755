"""A model of transformers under its own forward, for architectures that this project's transformer does not compute.

Shapes: N rows of a text, V vocabulary.
"""

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.card import is_masked_model
from refusion_eval.models.checkpoint import ModelConfig, read_json
from refusion_eval.models.weights import CheckpointFiles

log = logging.getLogger(__name__)

# Largest difference of logits, relative to the largest logit, that rounding explains.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# What `check_loaded` reads, with tensors of other shapes, which are else an error of their own.
_TELLING = {"output_loading_info": True, "ignore_mismatched_sizes": True}
_OF_LAYERS = ("num_key_value_heads", "head_dim")


def stock_config(directory: Path) -> ModelConfig:
    """Sizes of a checkpoint of any architecture of transformers, as far as decoding needs them."""
    try:
        config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False).get_text_config()
        heads = getattr(config, "num_attention_heads", None) or 1
        # Of a config whose layers differ, transformers refuses the attribute; most layers have what it holds.
        of_layers = {name: vars(config).get(name) or getattr(config, name, None) for name in _OF_LAYERS}
        return ModelConfig(
            family=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=of_layers["num_key_value_heads"] or heads,
            head_dim=of_layers["head_dim"] or config.hidden_size // heads,
            rms_norm_eps=1e-6,
            rope_theta=1.0,
            max_positions=getattr(config, "max_position_embeddings", None) or 1 << 20,  # some have no positions
            tied_head=bool(config.tie_word_embeddings),
            dtype=str(config.dtype or "float32").removeprefix("torch."),
        )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        failure = f"transformers cannot read its config.json without code of the checkpoint ({error})"
        raise CheckpointError(f"{directory}: {failure}; give an architecture that transformers has") from error


def load_stock(
    kind: Any,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    purpose: str = "",
    *,
    refuses_others: bool = False,
) -> Any:
    """A checkpoint under a class of transformers, from safetensors and without code of the checkpoint.

    Raises CheckpointError if it cannot be loaded, and as `check_loaded` does.
    """
    options = {"trust_remote_code": False, "use_safetensors": True, "local_files_only": True}
    try:
        module, told = kind.from_pretrained(directory, dtype=dtype, **options, **_TELLING)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        what = f"transformers cannot load it {purpose}".strip()
        raise CheckpointError(f"{directory}: {what} ({error})") from error
    check_loaded(directory, told, refuses_others=refuses_others)
    return module.to(device).eval()


def check_stock(kind: Any, directory: Path, *, refuses_others: bool = False) -> None:
    """Refuses an unquantised checkpoint whose tensors `load_stock` would refuse; only their names and shapes are read.

    Raises CheckpointError as `check_loaded` does.
    """
    # Transformers loads tensors without entries here, because it alone knows which of them its class renames, merges,
    # ties or does without. Quantised ones it converts by their entries.
    config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        return
    outlines = CheckpointFiles(directory).outlines()
    try:
        if not issubclass(kind, PreTrainedModel):  # but chooses a class by the config
            with torch.device("meta"):
                module = kind.from_config(config, trust_remote_code=False)
            kind, config = type(module), module.config  # of a model for texts and images, the part for texts
        _, told = kind.from_pretrained(None, config=config, state_dict=outlines, device_map="meta", **_TELLING)
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{directory}: transformers cannot load it ({error})") from error
    check_loaded(directory, told, refuses_others=refuses_others)


def check_loaded(directory: Path, told: Mapping[str, Any], *, refuses_others: bool) -> None:
    """Refuses a checkpoint in the place of whose tensors transformers has put random numbers.

    Args:
        told: what `from_pretrained` tells with `output_loading_info`.
        refuses_others: whether tensors that the class does not have are refused too.
    """
    for problem in ("missing_keys", "mismatched_keys", "error_msgs", "unexpected_keys"):
        # A mismatch has both shapes beside the name. Tables of the rotary embedding are computed.
        names = {one if isinstance(one, str) else one[0] for one in told.get(problem, ())}
        found = sorted(name for name in names if not name.endswith("rotary_emb.inv_freq"))
        if not found:
            continue
        listed = f"{len(found)} {problem.replace('_', ' ')} in the weights, such as {', '.join(found[:3])}"
        if problem != "unexpected_keys" or refuses_others:
            raise CheckpointError(f"{directory}: {listed}; take them and config.json from one checkpoint")
        log.warning("%s: %s; they are not used", directory, listed)


def _kind(directory: Path) -> Any:
    return AutoModelForMaskedLM if is_masked_model(read_json(directory / "config.json")) else AutoModelForCausalLM


class StockModel:
    """A checkpoint under its class in transformers."""

    def __init__(self, directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._is_causal = (kind := _kind(directory)) is AutoModelForCausalLM
        self._module: PreTrainedModel = load_stock(kind, directory, dtype, device)
        self.config, self.device, self.dtype = config, self._module.device, self._module.dtype

    @staticmethod
    def check_files(directory: Path) -> None:
        """Refuses a checkpoint whose tensors do not fit; only their names and shapes are read."""
        check_stock(_kind(directory), directory)

    @torch.inference_mode()
    def logits(self, tokens: list[int], positions: list[int], visible_NN: npt.NDArray[np.bool_]) -> Tensor:
        """Logits of every row of one text, float32, [N, V]; refuses patterns that the architecture does not take."""
        # Plain text in any order of rows needs no pattern, which only some architectures take.
        order = np.argsort(positions, kind="stable")
        is_plain = np.array_equal(visible_NN[np.ix_(order, order)], self._plain(len(tokens)))
        if is_plain and np.array_equal(np.asarray(positions)[order], np.arange(len(tokens))):
            logits_NV = self._call([tokens[row] for row in order])
            return logits_NV[torch.from_numpy(np.argsort(order)).to(logits_NV.device)]
        if not self._takes_patterns:
            suited = "decoder=autoregressive" if self._is_causal else "decoders that read the whole text"
            lacks = "takes no position ids or no attention pattern beside its tokens"
            only = f"so with backend=transformers it runs {suited} only"
            raise ConfigError(f"{self.config.family} of transformers {lacks}, {only}")
        return self._call(tokens, positions, visible_NN)

    def _plain(self, num_rows: int) -> npt.NDArray[np.bool_]:
        full_NN = np.ones((num_rows, num_rows), dtype=np.bool_)
        return np.tril(full_NN) if self._is_causal else full_NN

    def _call(
        self, tokens: list[int], positions: list[int] | None = None, visible_NN: npt.NDArray[np.bool_] | None = None
    ) -> Tensor:
        inputs = {"input_ids": torch.tensor([tokens], device=self.device)}
        if positions is not None and visible_NN is not None:
            # The smallest number instead of -inf, as transformers builds masks: its softmax has no row of -inf alone.
            mask_NN = np.where(visible_NN, 0, torch.finfo(self.dtype).min)
            inputs["attention_mask"] = torch.tensor(mask_NN, dtype=self.dtype, device=self.device)[None, None]
            inputs["position_ids"] = torch.tensor([positions], device=self.device)
        return self._module(**inputs).logits[0].float()

    @cached_property
    def _takes_patterns(self) -> bool:
        # Tried on three rows, as some classes accept both and ignore them: as plain text in another order of rows, and
        # with rows that see themselves alone.
        text, order = [0, 1, 2], [2, 0, 1]
        try:
            moved_NV = self._call(order, order, self._plain(3)[np.ix_(order, order)])
            alone_NV = self._call(text, [0, 0, 0], np.eye(3, dtype=np.bool_))
            pairs = [(moved_NV, self._call(text)[order]), (alone_NV[2], self._call([2])[0])]
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
        scales = [float(right.abs().max()) or 1.0 for _, right in pairs]
        differences = [float((computed - right).abs().max()) for computed, right in pairs]
        return all(np.array(differences) <= _TOLERANCE[self.dtype] * np.array(scales))
