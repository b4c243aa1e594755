"""One forward of fixed shape in few operations, each of which is one or two kernels on CUDA.

The body of each operation is its definition in plain torch, which runs on a CPU. On CUDA the kernel of the same name in
`refusion_eval.models.kernels` runs instead. What differs between forwards is read on the device, for CUDA graphs.

Where each row belongs is told by four numbers: its sequence, the committed rows of that sequence, the rows of that
sequence in this forward, and the number of the row among them. The rows of a sequence are neighbours, and the sequences
ascend from 0. A row of sequence -1 is padding: it is neither stored nor attended to, and what it gets means nothing.

Shapes: W rows, C residual width, H query heads, G key-value heads, D head width, I width of the MLP, V vocabulary,
S sequences, K rows of the KV buffer, L layers, B 64-bit words a row of the visibility pattern, N rows that are read,
R rows of what a product reads: at least W, and as many as it computes fastest. The rows after the first W are anything.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from refusion_eval.models import layers
from refusion_eval.models.attention import BITS, grouped_attention
from refusion_eval.models.choices import MATRICES, NO_CHOICES, Choices
from refusion_eval.models.experts import mix_experts
from refusion_eval.models.layers import linear
from refusion_eval.models.transformer import Transformer, rms_norm, rotate


def _padded(x: Tensor, num_rows: int) -> Tensor:
    # Not numbers, so that a result that read one of these rows would show it.
    return torch.cat((x, x.new_full((max(num_rows - len(x), 0), *x.shape[1:]), float("nan"))))


@custom_op("refusion_eval::add_rms_norm", mutates_args=())
def add_rms_norm(
    x_WC: Tensor, added_WC: Tensor, weight_C: Tensor, eps: float, num_rows: int = 0
) -> tuple[Tensor, Tensor]:
    """The sum, [W, C], and its norm, [R, C] with R = max(W, num_rows)."""
    total_WC = x_WC + added_WC
    return total_WC, _padded(rms_norm(total_WC, weight_C, eps), num_rows)


@custom_op("refusion_eval::rotate_and_store", mutates_args=("keys_SGKD", "values_SGKD"))
def rotate_and_store(
    qkv_WO: Tensor,
    norm_PD: Tensor | None,
    tables: Tensor,
    positions_W: Tensor,
    places_4W: Tensor,
    keys_SGKD: Tensor,
    values_SGKD: Tensor,
    eps: float,
) -> Tensor:
    """Writes the rotated keys and the values of the rows to the KV buffer; returns the rotated queries, [W, H, D].

    Args:
        qkv_WO: queries, keys and values of the rows, [W, (H + 2G) D].
        norm_PD: scales of the norm of each query and key head, [H + G, D]; None for no norm.
        tables: cosine and signed sine of every position, [positions, 2, D].
    """
    num_groups, head = keys_SGKD.shape[1], keys_SGKD.shape[3]
    qkv_WPD = qkv_WO.view(len(qkv_WO), -1, head)
    qk_WPD, v_WGD = qkv_WPD[:, :-num_groups], qkv_WPD[:, -num_groups:]
    if norm_PD is not None:
        qk_WPD = rms_norm(qk_WPD, norm_PD, eps)
    cos_W1D, sin_W1D = tables[positions_W].split(1, dim=1)
    rotated_WPD = rotate(qk_WPD, cos_W1D, sin_W1D)
    is_row_W = places_4W[0] >= 0  # padding would overwrite a row that another sequence needs
    sequences_T, committed_T, _, numbers_T = places_4W[:, is_row_W]
    keys_SGKD[sequences_T, :, committed_T + numbers_T] = rotated_WPD[is_row_W, -num_groups:]
    values_SGKD[sequences_T, :, committed_T + numbers_T] = v_WGD[is_row_W]
    return rotated_WPD[:, :-num_groups].contiguous()


@custom_op("refusion_eval::swiglu", mutates_args=())
def swiglu(gate_up_WI: Tensor, num_rows: int = 0) -> Tensor:
    return _padded(layers.swiglu(gate_up_WI), num_rows)


@custom_op("refusion_eval::attend_rows", mutates_args=())
def attend_rows(
    queries_WHD: Tensor,
    keys_SGKD: Tensor,
    values_SGKD: Tensor,
    places_4W: Tensor,
    bits_WB: Tensor,
    num_rows: int = 0,
) -> Tensor:
    """Attention of each row over the rows of its sequence in the KV buffer, [R, H, D] with R = max(W, num_rows).

    Args:
        keys_SGKD: keys of the layer: for each sequence its committed rows, which all of its rows see, then its rows of
            this forward, and anything after them.
        bits_WB: which rows of its sequence in this forward each row sees (`attention.pattern_bits`); at least one.
    """
    attended_WHD = torch.zeros_like(queries_WHD)
    for sequence in range(int(places_4W[0].max()) + 1):
        rows_T = (places_4W[0] == sequence).nonzero()[:, 0]
        num_own, length = len(rows_T), int(places_4W[1, rows_T[0]])
        bits_TBJ = bits_WB[rows_T, :, None] >> torch.arange(BITS) & 1
        mask_TK = torch.zeros(num_own, length + num_own, dtype=queries_WHD.dtype)
        mask_TK[:, length:].masked_fill_(bits_TBJ.flatten(1)[:, :num_own] == 0, float("-inf"))
        keys_GKD, values_GKD = (buffer[sequence, :, : length + num_own] for buffer in (keys_SGKD, values_SGKD))
        attended_WHD[rows_T] = grouped_attention(queries_WHD[rows_T], keys_GKD, values_GKD, mask_TK, is_causal=False)
    return _padded(attended_WHD, num_rows)


@custom_op("refusion_eval::read_rows", mutates_args=("out_3N",))
def read_rows(logits_WV: Tensor, rows_N: Tensor, given_N: Tensor, suppressed_N: Tensor, out_3N: Tensor) -> None:
    """Finds the tokens with the largest logits, their probabilities, and the probabilities of the given tokens.

    Args:
        suppressed_N: an id for each of them that may not be chosen but counts in the softmax, -1 for none. Among equals
            the lowest id is chosen.
        out_3N: receives the three results; float32, in which ids below 2**24 are exact.
    """
    logits_NV = logits_WV[rows_N].float()
    log_sums_N = logits_NV.logsumexp(dim=-1)
    ids_V = torch.arange(logits_NV.shape[1], device=logits_WV.device)
    choosable_NV = logits_NV.masked_fill(ids_V == suppressed_N[:, None], float("-inf"))
    chosen_N, tokens_N = choosable_NV.max(dim=-1)
    given_logits_N = logits_NV.gather(1, given_N[:, None])[:, 0]
    probs_2N = (torch.stack((chosen_N, given_logits_N)) - log_sums_N).exp().clamp(max=1)
    out_3N.copy_(torch.cat((tokens_N[None].float(), probs_2N)))


def _rows(x: Tensor, num_rows: int, *sizes: int) -> Tensor:
    return x.new_empty(max(len(x), num_rows), *sizes)


# For tensors without storage: a result of the right shape.
read_rows.register_fake(lambda *_: None)


@add_rms_norm.register_fake
def _(x_WC: Tensor, added_WC: Tensor, weight_C: Tensor, eps: float, num_rows: int = 0) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_WC), x_WC.new_empty(max(len(x_WC), num_rows), x_WC.shape[1])


@swiglu.register_fake
def _(gate_up_WI: Tensor, num_rows: int = 0) -> Tensor:
    return gate_up_WI.new_empty(max(len(gate_up_WI), num_rows), gate_up_WI.shape[1] // 2)


@attend_rows.register_fake
def _(queries_WHD: Tensor, *rest: Any) -> Tensor:
    return queries_WHD.new_empty(max((len(queries_WHD), *rest[4:])), *queries_WHD.shape[1:])


@rotate_and_store.register_fake
def _(qkv_WO: Tensor, *rest: Any) -> Tensor:
    num_groups, head = rest[4].shape[1], rest[4].shape[3]
    return qkv_WO.new_empty(len(qkv_WO), qkv_WO.shape[1] // head - 2 * num_groups, head)


def _kernel(name: str) -> Callable[..., Any]:
    # Triton is imported when it is first used: builds of torch for CPUs have none.
    def run(*arguments: Any) -> Any:
        from refusion_eval.models import kernels

        return getattr(kernels, name)(*arguments)

    return run


OPERATIONS = {
    "add_rms_norm": add_rms_norm,
    "rotate_and_store": rotate_and_store,
    "swiglu": swiglu,
    "attend_rows": attend_rows,
    "read_rows": read_rows,
    "mix_experts": mix_experts,
}
for _name, _operation in OPERATIONS.items():
    _operation.register_kernel("cuda", _kernel(_name))


def fused_hidden(
    model: Transformer,
    tables: Tensor,
    rows_6W: Tensor,
    bits_WB: Tensor,
    keys: Tensor,
    values: Tensor,
    choices: Choices = NO_CHOICES,
) -> tuple[Tensor, Tensor]:
    """The residual stream of a forward, [W, C], and its final norm, [R, C]; keys are [L, S, G, K, D]."""
    tokens_W, positions_W, places_4W = rows_6W[0], rows_6W[1], rows_6W[2:]
    num_rows, weights, eps = len(tokens_W), model.weights, model.config.rms_norm_eps
    of_qkv, of_out, of_gate_up, of_down, of_head = (choices.product(matrix, num_rows).padded_to for matrix in MATRICES)
    x_WC, is_row_W = model.embed(tokens_W), None if model.config.experts is None else places_4W[0] >= 0
    normed_RC = rms_norm(x_WC, weights.layers[0].input_norm, eps)
    # A sum and the norm after it are one kernel, so the norm of the next layer belongs to the end of this one.
    next_norms = [(layer.input_norm, of_qkv) for layer in weights.layers[1:]] + [(weights.final_norm, of_head)]
    for layer, (next_norm, next_rows), *cached in zip(weights.layers, next_norms, keys, values, strict=True):
        qkv_WO = linear(normed_RC, layer.qkv, layer.qkv_bias)[:num_rows]
        queries_WHD = rotate_and_store(qkv_WO, layer.qk_norm, tables, positions_W, places_4W, *cached, eps)
        attended_RHD = attend_rows(queries_WHD, *cached, places_4W, bits_WB, of_out)
        projected_WC = linear(attended_RHD.flatten(1), layer.out)[:num_rows]
        if layer.experts is None:
            x_WC, normed_RC = add_rms_norm(x_WC, projected_WC, layer.mlp_norm, eps, of_gate_up)
            inner_RI = swiglu(linear(normed_RC, layer.gate_up)[:num_rows], of_down)
            mlp_WC = linear(inner_RI, layer.down)[:num_rows]
        else:  # which other rows must not choose
            x_WC, normed_WC = add_rms_norm(x_WC, projected_WC, layer.mlp_norm, eps)
            mlp_WC = model.feed_forward(layer, normed_WC, swiglu, is_row_W)
        x_WC, normed_RC = add_rms_norm(x_WC, mlp_WC, next_norm, eps, next_rows)
    return x_WC, normed_RC
