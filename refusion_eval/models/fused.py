"""One forward of fixed shape in few operations, each of which is one or two kernels on CUDA.

The body of each operation is its definition in plain torch, which runs on a CPU. On CUDA the kernel of the same name in
`refusion_eval.models.kernels`, `attention_kernels` or `product_kernels` runs instead, and `early` says whether it may
begin while the kernel before it still runs. What differs between forwards is read on the device, for CUDA graphs.

Where each row belongs is told by four numbers: its sequence, the committed rows of that sequence, the rows of that
sequence in this forward, and the number of the row among them. The rows of a sequence are neighbours, and the sequences
ascend; some of the buffer may have none. A row of sequence -1 is padding: it is neither stored nor attended to, and
what it gets means nothing.

Shapes: W rows, C residual width, H query heads, G key-value heads, D head width, I width of the MLP, V vocabulary,
S sequences, K rows of the KV buffer, L layers, B 64-bit words a row of the visibility pattern, N rows that are read,
R = max(W, num_rows) rows of what a product reads, of which those after the first W are anything, P parts of a sum.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from refusion_eval.models import layers
from refusion_eval.models.attention import BITS, grouped_attention
from refusion_eval.models.choices import MATRICES, NO_CHOICES, SPLIT, Choices, Matrix, launches_early
from refusion_eval.models.experts import mix_experts
from refusion_eval.models.layers import linear
from refusion_eval.models.transformer import Transformer, rms_norm, rotate


def _padded(x: Tensor, num_rows: int) -> Tensor:
    # Not numbers, so that a result that read one of these rows would show it.
    return torch.cat((x, x.new_full((max(num_rows - len(x), 0), *x.shape[1:]), float("nan"))))


@custom_op("refusion_eval::add_rms_norm", mutates_args=())
def add_rms_norm(
    x_WC: Tensor, added: Tensor, weight_C: Tensor, eps: float, num_rows: int = 0, early: bool = False
) -> tuple[Tensor, Tensor]:
    """The sum, [W, C], and its norm, [R, C]; what is added is [W, C], or float32 parts that are summed, [P, W, C]."""
    if added.ndim == 3:
        added = reduce(torch.add, added).to(x_WC.dtype)
    total_WC = x_WC + added
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
    early: bool = False,
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
def swiglu(gate_up_WI: Tensor, num_rows: int = 0, early: bool = False) -> Tensor:
    return _padded(layers.swiglu(gate_up_WI), num_rows)


@custom_op("refusion_eval::attend_rows", mutates_args=("counters",))
def attend_rows(
    queries_WHD: Tensor,
    keys_SGKD: Tensor,
    values_SGKD: Tensor,
    places_4W: Tensor,
    bits_WB: Tensor,
    num_rows: int = 0,
    counters: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Attention of each row over the rows of its sequence in the KV buffer, [R, H, D].

    Args:
        keys_SGKD: keys of the layer: for each sequence its committed rows, which all of its rows see, then its rows of
            this forward, and anything after them.
        bits_WB: which rows of its sequence in this forward each row sees (`attention.pattern_bits`); at least one.
        counters: zeros, int32, `NUM_COUNTERS` of them, with which the last of the programs that share a row knows that
            it is the last; it joins their parts and leaves zeros. Without them, a kernel of its own joins the parts.
    """
    attended_WHD = torch.zeros_like(queries_WHD)
    for sequence in range(int(places_4W[0].max()) + 1):
        rows_T = (places_4W[0] == sequence).nonzero()[:, 0]
        if not len(rows_T):  # a place of the buffer whose sequence has no row in this forward
            continue
        num_own, length = len(rows_T), int(places_4W[1, rows_T[0]])
        bits_TBJ = bits_WB[rows_T, :, None] >> torch.arange(BITS) & 1
        mask_TK = torch.zeros(num_own, length + num_own, dtype=queries_WHD.dtype)
        mask_TK[:, length:].masked_fill_(bits_TBJ.flatten(1)[:, :num_own] == 0, float("-inf"))
        keys_GKD, values_GKD = (buffer[sequence, :, : length + num_own] for buffer in (keys_SGKD, values_SGKD))
        attended_WHD[rows_T] = grouped_attention(queries_WHD[rows_T], keys_GKD, values_GKD, mask_TK, is_causal=False)
    return _padded(attended_WHD, num_rows)


@custom_op("refusion_eval::rotate_and_attend", mutates_args=("keys_SGKD", "values_SGKD", "counters"))
def rotate_and_attend(
    qkv_WO: Tensor,
    norm_PD: Tensor | None,
    tables: Tensor,
    positions_W: Tensor,
    places_4W: Tensor,
    keys_SGKD: Tensor,
    values_SGKD: Tensor,
    bits_WB: Tensor,
    eps: float,
    num_rows: int = 0,
    counters: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """`rotate_and_store`, then `attend_rows` with the queries of it, in one kernel."""
    cached = keys_SGKD, values_SGKD
    queries_WHD = rotate_and_store(qkv_WO, norm_PD, tables, positions_W, places_4W, *cached, eps)
    return attend_rows(queries_WHD, *cached, places_4W, bits_WB, num_rows)


@custom_op("refusion_eval::product", mutates_args=())
def product(
    x_RI: Tensor, weight_OI: Tensor, num_rows: int, kernel: str, tiles: Sequence[int], early: bool = False
) -> Tensor:
    """The first rows times the transposed matrix, [W, O] with W = num_rows.

    Args:
        kernel: which own product (`refusion_eval.models.choices`).
        tiles: columns and entries of a block, splits, warps and stages.
    """
    return linear(x_RI[:num_rows], weight_OI)


@custom_op("refusion_eval::product_parts", mutates_args=())
def product_parts(
    x_RI: Tensor, weight_OI: Tensor, num_rows: int, kernel: str, tiles: Sequence[int], early: bool = False
) -> Tensor:
    """As `product`, as float32 parts of the sum, one for each split of the entries, [P, W, O]."""
    pairs = zip(*(matrix.float().chunk(tiles[2], dim=1) for matrix in (x_RI[:num_rows], weight_OI)), strict=True)
    return torch.stack([linear(x_WI, part_OI) for x_WI, part_OI in pairs])


@custom_op("refusion_eval::gated_product", mutates_args=())
def gated_product(
    x_RI: Tensor,
    gate_up_QI: Tensor,
    rows_read: int,
    kernel: str,
    tiles: Sequence[int],
    num_rows: int = 0,
    early: bool = False,
) -> Tensor:
    """`swiglu` of the product of the first rows with both matrices of an MLP, [R, Q / 2]; the gate's come first."""
    return _padded(layers.swiglu(linear(x_RI[:rows_read], gate_up_QI)), num_rows)


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


OPERATIONS = {
    "add_rms_norm": add_rms_norm,
    "rotate_and_store": rotate_and_store,
    "swiglu": swiglu,
    "attend_rows": attend_rows,
    "rotate_and_attend": rotate_and_attend,
    "product": product,
    "product_parts": product_parts,
    "gated_product": gated_product,
    "read_rows": read_rows,
    "mix_experts": mix_experts,
}
MODULES = {
    **dict.fromkeys(("rotate_and_store", "attend_rows", "rotate_and_attend"), "attention_kernels"),
    **dict.fromkeys(("product", "product_parts", "gated_product"), "product_kernels"),
}
LONG = 8192  # rows of a KV buffer that is not long yet; in a long one attention has other stages and splits
NUM_COUNTERS = 256  # blocks of attention whose keys several programs share are fewer


def _kernel(name: str) -> Callable[..., Any]:
    # Triton is imported when it is first used: builds of torch for CPUs have none.
    def run(*arguments: Any) -> Any:
        module = importlib.import_module(f"refusion_eval.models.{MODULES.get(name, 'kernels')}")
        return getattr(module, name)(*arguments)

    return run


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
    counters: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual stream of a forward, [W, C], and its final norm, [R, C]; keys are [L, S, G, K, D]."""
    tokens_W, positions_W, places_4W = rows_6W[0], rows_6W[1], rows_6W[2:]
    num_rows, weights, eps = len(tokens_W), model.weights, model.config.rms_norm_eps
    of = {matrix: choices.product(matrix, num_rows) for matrix in MATRICES}
    rows = {matrix: chosen.padded_to for matrix, chosen in of.items()}
    switches = choices.switches_of(num_rows)
    early, joining = switches.early and launches_early(model.device), counters if switches.joins else None

    def multiply(x_RI: Tensor, weight_OI: Tensor, matrix: Matrix, bias_O: Tensor | None = None) -> Tensor:
        # The product of a forward's rows, [W, O]; of a matrix that is split, its parts, [P, W, O].
        chosen = of[matrix]
        if not chosen.is_own or bias_O is not None:
            return linear(x_RI, weight_OI, bias_O)[:num_rows]
        operation = product_parts if matrix in SPLIT else product
        return operation(x_RI, weight_OI, num_rows, chosen.kernel, chosen.tiles, early)

    x_WC, is_row_W = model.embed(tokens_W), None if model.config.experts is None else places_4W[0] >= 0
    normed_RC = rms_norm(x_WC, weights.layers[0].input_norm, eps)
    # A sum and the norm after it are one kernel, so the norm of the next layer belongs to the end of this one.
    next_norms = [(layer.input_norm, rows["qkv"]) for layer in weights.layers[1:]]
    next_norms.append((weights.final_norm, rows["head"]))
    for layer, (next_norm, next_rows), *cached in zip(weights.layers, next_norms, keys, values, strict=True):
        qkv_WO = multiply(normed_RC, layer.qkv, "qkv", layer.qkv_bias)
        rotation = layer.qk_norm, tables, positions_W, places_4W, *cached
        if switches.rotates:
            attended_RHD = rotate_and_attend(qkv_WO, *rotation, bits_WB, eps, rows["out"], joining, early)
        else:
            queries_WHD = rotate_and_store(qkv_WO, *rotation, eps, early)
            attended_RHD = attend_rows(queries_WHD, *cached, places_4W, bits_WB, rows["out"], joining, early)
        projected = multiply(attended_RHD.flatten(1), layer.out, "out")
        if layer.experts is None:
            x_WC, normed_RC = add_rms_norm(x_WC, projected, layer.mlp_norm, eps, rows["gate_up"], early)
            gated = of["gate_up"]
            if gated.is_own:
                inner = normed_RC, layer.gate_up, num_rows, gated.kernel, gated.tiles
                inner_RI = gated_product(*inner, rows["down"], early)
            else:
                inner_RI = swiglu(linear(normed_RC, layer.gate_up)[:num_rows], rows["down"], early)
            mlp = multiply(inner_RI, layer.down, "down")
        else:  # of which rows of padding choose none
            x_WC, normed_WC = add_rms_norm(x_WC, projected, layer.mlp_norm, eps, 0, early)
            mlp = model.feed_forward(layer, normed_WC, partial(swiglu, early=early), is_row_W)
        x_WC, normed_RC = add_rms_norm(x_WC, mlp, next_norm, eps, next_rows, early)
    return x_WC, normed_RC
