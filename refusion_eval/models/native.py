"""A forward on a CPU as one compiled function that computes in float32, and its readout as another.

At a few rows, torch's forward on a CPU is mostly the launching of operations. Here numba compiles everything between
the matrix products into loops. The products are those of `refusion_eval.models.products`. Where they are impossible
torch's forward is used, the oracle in tests. numba keeps the machine code in `__pycache__` (or NUMBA_CACHE_DIR).

Shapes: T packed rows, C residual width, H query heads, G key-value heads, P = H + G rotated heads, D head width,
O = (H + 2G) D, I width of the MLP, V vocabulary, L layers, S sequences, K rows of the KV buffer, N rows read.
"""

import logging
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.core import event
from numba.extending import intrinsic
from torch import Tensor

from refusion_eval.models.attention import ALL, BITS, CAUSAL, PATTERN
from refusion_eval.models.cache import KVCache
from refusion_eval.models.checkpoint import ModelConfig
from refusion_eval.models.products import (
    ADD,
    AS_IS,
    SET,
    TRANSPOSED,
    compile_products,
    compiled,
    dot,
    multiply,
    obstacle,
    place_of,
    product,
)
from refusion_eval.models.weights import Weights

MAX_QUERIES = 64  # rows of a sequence whose scores are held at once
MAX_READ = 64  # rows whose logits are held at once

Integers = npt.NDArray[np.int64]

log = logging.getLogger(__name__)

_F32 = np.float32


@intrinsic
def _power_of_two(context, exponent):
    """2 to the power of a whole float32 between -126 and 127, by its bits."""

    def generate(context, builder, signature, arguments):
        i32 = ir.IntType(32)
        biased = builder.add(builder.fptosi(arguments[0], i32), ir.Constant(i32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(i32, 23)), ir.FloatType())

    return types.float32(types.float32), generate


@intrinsic
def _larger(context, first, second):
    """The larger of two float32; a NaN is passed over."""
    # Python's max compiles to a branch, which the compiler does not turn into vector instructions.

    def generate(context, builder, signature, arguments):
        kind = ir.FloatType()
        function = builder.module.declare_intrinsic("llvm.maxnum", [kind], ir.FunctionType(kind, [kind, kind]))
        return builder.call(function, arguments, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), generate


@compiled
def _exp(x):
    """The exponential of x <= 88 to one unit in the last place (Cephes' expf); 0 below -87."""
    kept = min(max(x, _F32(-87)), _F32(88))
    power = np.floor(kept * _F32(1.44269504) + _F32(0.5))
    rest = kept - power * _F32(0.693359375) + power * _F32(2.12194440e-4)
    series = _F32(1.9875691500e-4)
    series = series * rest + _F32(1.3981999507e-3)
    series = series * rest + _F32(8.3334519073e-3)
    series = series * rest + _F32(4.1665795894e-2)
    series = series * rest + _F32(1.6666665459e-1)
    series = series * rest + _F32(5.0000001201e-1)
    value = (series * rest * rest + rest + _F32(1)) * _power_of_two(power)
    return _F32(0) if x < _F32(-87) else value


@compiled
def _norm(x_TC, weight_C, eps, out_TC):
    size = x_TC.shape[1]
    for row in range(x_TC.shape[0]):
        x, out = x_TC[row], out_TC[row]
        squares = _F32(0)
        for i in range(size):
            squares += x[i] * x[i]
        scale = _F32(1) / np.sqrt(squares / _F32(size) + eps)
        for i in range(size):
            out[i] = x[i] * scale * weight_C[i]


@compiled
def _rotate_and_store(qkv_TO, norm_PD, tables, positions, eps, keys_GKD, values_GKD, start):
    """Rotates queries in place, divided by the root of D, and stores keys and values after `start` committed rows."""
    # One pass over the row while it is in the cache, where torch makes five.
    num_groups, _, head = keys_GKD.shape
    num_heads = qkv_TO.shape[1] // head - 2 * num_groups
    half = head // 2
    for index in range(positions.shape[0]):
        row = qkv_TO[index]
        cos, sin = tables[positions[index], 0], tables[positions[index], 1]
        for part in range(num_heads + num_groups):
            x = row[part * head : (part + 1) * head]
            if norm_PD.shape[0]:
                squares = _F32(0)
                for i in range(head):
                    squares += x[i] * x[i]
                scale = _F32(1) / np.sqrt(squares / _F32(head) + eps)
                for i in range(head):
                    x[i] = x[i] * scale * norm_PD[part, i]
            target = x if part < num_heads else keys_GKD[part - num_heads, start + index]
            scale = _F32(1 / math.sqrt(head)) if part < num_heads else _F32(1)
            for i in range(half):
                low, high = x[i] * scale, x[i + half] * scale
                target[i] = low * cos[i] + high * sin[i]
                target[i + half] = high * cos[i + half] + low * sin[i + half]
        for group in range(num_groups):
            # Loops, here and below: numba compiles the assignment of a slice, with its messages, for 3 seconds.
            value, target = row[(num_heads + num_groups + group) * head :], values_GKD[group, start + index]
            for i in range(head):
                target[i] = value[i]


@compiled
def _largest(values):
    largest = values[0]
    for i in range(len(values)):
        largest = _larger(largest, values[i])
    return largest


@compiled
def _softmax(scores, num_keys, num_seen, kind, row, pattern):
    """Weights of the keys of one query from their scores, in place; `num_seen` of the keys are committed."""
    end = num_seen + row + 1 if kind == CAUSAL else num_keys
    if kind == PATTERN:
        own = scores[num_seen:num_keys]
        for i in range(num_keys - num_seen):
            own[i] = own[i] if (pattern[i // BITS] >> (i % BITS)) & 1 else _F32(-1e30)
    largest, total = _largest(scores[:end]), _F32(0)
    for i in range(end):
        weight = _exp(scores[i] - largest)
        scores[i] = weight
        total += weight
    scale = _F32(1) / total
    for i in range(end):
        scores[i] *= scale
    for i in range(end, num_keys):
        scores[i] = _F32(0)


@compiled
def _attend(qkv_TO, width, keys_GKD, values_GKD, start, kind, pattern, scores, out_TX):
    """Attention of the `width` rows of one sequence, MAX_QUERIES at a time; `start` rows are committed."""
    # The keys and values of `qkv_TO` are in the buffers already. `pattern` holds the words of its rows one by one.
    num_groups, _, head = keys_GKD.shape
    words = -(-width // BITS)
    num_heads = out_TX.shape[1] // head
    if width == 1:
        for group in range(num_groups):
            heads = slice(group * num_heads // num_groups * head, (group + 1) * num_heads // num_groups * head)
            buffers = keys_GKD[group], values_GKD[group]
            _attend_one(qkv_TO[0, heads], *buffers, start + 1, pattern, scores, out_TX[0, heads])
        return
    # Blocks of queries keep the scores in the caches of the processor, however long the text is.
    for begin in range(0, width, MAX_QUERIES):
        count = min(MAX_QUERIES, width - begin)
        num_keys = start + (begin + count if kind == CAUSAL else width)
        for part in range(num_heads):
            group = part * num_groups // num_heads
            keys, values = keys_GKD[group].ctypes.data, values_GKD[group].ctypes.data
            query, out = qkv_TO[begin, part * head :].ctypes.data, out_TX[begin, part * head :].ctypes.data
            step = qkv_TO.shape[1]
            product(query, count, step, keys, TRANSPOSED, num_keys, head, SET, scores.ctypes.data, num_keys)
            for index in range(count):
                row = begin + index
                own = pattern[row * words : (row + 1) * words]
                _softmax(scores[index * num_keys : (index + 1) * num_keys], num_keys, start, kind, row, own)
            step = out_TX.shape[1]
            product(scores.ctypes.data, count, num_keys, values, AS_IS, head, num_keys, SET, out, step)


@compiled
def _attend_one(queries, keys_KD, values_KD, num_keys, pattern, scores, out):
    """Attention of the heads of a group of one row, which sees all keys."""
    # A BLAS is slow with matrices of so few rows.
    head = keys_KD.shape[1]
    num_heads = len(queries) // head
    for key in range(num_keys):
        for part in range(num_heads):
            scores[part * num_keys + key] = dot(queries[part * head : (part + 1) * head], keys_KD[key])
    for part in range(num_heads):
        weights, attended = scores[part * num_keys : (part + 1) * num_keys], out[part * head : (part + 1) * head]
        _softmax(weights, num_keys, num_keys, ALL, 0, pattern)
        for i in range(head):
            attended[i] = _F32(0)
        for key in range(num_keys):
            weight, value = weights[key], values_KD[key]
            for i in range(head):
                attended[i] += weight * value[i]


@compiled
def _swiglu(gate_up_TI, out_TI):
    size = out_TI.shape[1]
    for row in range(out_TI.shape[0]):
        gate, up, out = gate_up_TI[row, :size], gate_up_TI[row, size:], out_TI[row]
        for i in range(size):
            out[i] = gate[i] * up[i] / (_F32(1) + _exp(-gate[i]))


@compiled
def _hidden(x_TC, positions, tables, matrices, norms, qkv_bias, qk_norm, eps, sizes, keys, values, sequences, pattern):
    """All layers, in place of the residual stream.

    Args:
        matrices: address and layout of each layer's `qkv`, `out`, `gate_up` and `down` (`LayerWeights`), [L, 4, 2].
        norms: scales before attention and before the MLP, [L, 2, C].
        qkv_bias: [L, O], or [L, 0] for none.
        qk_norm: [L, P, D], or [L, 0, D] for none.
        keys: keys of all sequences, [L, S, G, K, D].
    """
    num_heads, inner = sizes
    num_layers, _, num_groups, _, head = keys.shape
    num_rows, width = x_TC.shape
    attended, outputs = num_heads * head, (num_heads + 2 * num_groups) * head
    normed_TC = np.empty((num_rows, width), dtype=_F32)
    qkv_TO = np.empty((num_rows, outputs), dtype=_F32)
    attended_TX = np.empty((num_rows, attended), dtype=_F32)
    gate_up_TI = np.empty((num_rows, 2 * inner), dtype=_F32)
    inner_TI = np.empty((num_rows, inner), dtype=_F32)
    most = 0
    for index in range(len(sequences)):
        rows = max(min(sequences[index, 2], MAX_QUERIES), num_heads // num_groups)
        most = max(most, rows * (sequences[index, 1] + sequences[index, 2]))
    scores = np.empty(most, dtype=_F32)
    for layer in range(num_layers):
        _norm(x_TC, norms[layer, 0], eps, normed_TC)
        for row in range(num_rows if qkv_bias.shape[1] else 0):
            for i in range(outputs):
                qkv_TO[row, i] = qkv_bias[layer, i]
        multiply(normed_TC, matrices[layer, 0], ADD if qkv_bias.shape[1] else SET, qkv_TO)
        first = 0
        for index in range(len(sequences)):
            sequence, start, count, kind, begin = sequences[index]
            end = first + count
            keys_GKD, values_GKD = keys[layer, sequence], values[layer, sequence]
            own = qkv_TO[first:end]
            _rotate_and_store(own, qk_norm[layer], tables, positions[first:end], eps, keys_GKD, values_GKD, start)
            _attend(own, count, keys_GKD, values_GKD, start, kind, pattern[begin:], scores, attended_TX[first:end])
            first = end
        multiply(attended_TX, matrices[layer, 1], ADD, x_TC)
        _norm(x_TC, norms[layer, 1], eps, normed_TC)
        multiply(normed_TC, matrices[layer, 2], SET, gate_up_TI)
        _swiglu(gate_up_TI, inner_TI)
        multiply(inner_TI, matrices[layer, 3], ADD, x_TC)


@compiled
def _read(x_TC, reads, suppressed, norm_C, eps, head, size, out):
    """The likeliest token of each row that is read, its probability, and that of the given token, to `out`, [3, N].

    Args:
        reads: rows, and a given token for each, [2 or more, N].
        suppressed: an id for each that may not be chosen but counts in the softmax, -1 for none, [N].
    """
    num_reads, width = reads.shape[1], x_TC.shape[1]
    normed_NC = np.empty((min(num_reads, MAX_READ), width), dtype=_F32)
    logits_NV = np.empty((min(num_reads, MAX_READ), size), dtype=_F32)
    for begin in range(0, num_reads, MAX_READ):
        count = min(MAX_READ, num_reads - begin)
        for index in range(count):
            row = reads[0, begin + index]
            _norm(x_TC[row : row + 1], norm_C, eps, normed_NC[index : index + 1])
        multiply(normed_NC[:count], head, SET, logits_NV[:count])
        for index in range(count):
            _read_row(logits_NV[index], reads[1, begin + index], suppressed[begin + index], out[:, begin + index])


@compiled
def _read_row(logits, given, suppressed, out):
    largest = _largest(logits)
    total, broken = _F32(0), _F32(0)
    for i in range(len(logits)):
        total += _exp(logits[i] - largest)
        broken += logits[i] * _F32(0)  # stays 0 unless a logit is infinite or not a number
    log_sum, given_logit = largest + np.log(total) + broken, logits[given]
    if suppressed >= 0:
        logits[suppressed] = _F32(-np.inf)
        largest = _largest(logits)
    chosen = 0
    while chosen < len(logits) - 1 and logits[chosen] != largest:
        chosen += 1
    out[0] = chosen
    out[1] = min(np.exp(largest - log_sum), _F32(1))
    out[2] = min(np.exp(given_logit - log_sum), _F32(1))


# The types of every call of `_hidden` and `_read`, in the order of their arguments: each is compiled once.
_F1, _F2, _F3, _F5 = (types.Array(types.float32, num_axes, "C") for num_axes in (1, 2, 3, 5))
_I1, _I2, _I3 = (types.Array(types.int64, num_axes, "C") for num_axes in (1, 2, 3))
_SIZES = types.UniTuple(types.int64, 2)
_HIDDEN_TYPES = (_F2, _I1, _F3, _I3, _F3, _F2, _F3, types.float32, _SIZES, _F5, _F5, _I2, _I1)
_READ_TYPES = (_F2, _I2, _I1, _F1, types.float32, _I1, types.int64, _F2)


class _Announcement(event.Listener):
    """Says once that something is compiled, which happens where no compiled code is stored yet."""

    is_said = False

    def on_start(self, event: event.Event) -> None:
        if not self.is_said:
            log.info("compiling the forward for this processor; this happens once and takes some seconds")
        self.is_said = True

    def on_end(self, event: event.Event) -> None:
        pass


def compile_forwards() -> None:
    """Compiles the forward and its readout, or loads the code that a former process compiled."""
    # Called while an environment is set up, because compiling takes seconds; else by the first model.
    if obstacle() is None:
        with event.install_listener("numba:compile", _Announcement()):
            compile_products()
            _hidden.compile(_HIDDEN_TYPES)
            _read.compile(_READ_TYPES)


class NativeForward:
    def __init__(self, config: ModelConfig, weights: Weights, tables: Callable[[int], Tensor]) -> None:
        compile_forwards()
        layers = weights.layers
        self._embedding, self._tables = weights.embedding, tables
        self._final_norm, self._vocab_size = weights.final_norm.numpy(), config.vocab_size
        matrices = [
            place_of(matrix) for layer in layers for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        biases = [layer.qkv_bias for layer in layers if layer.qkv_bias is not None]
        scales = [layer.qk_norm for layer in layers if layer.qk_norm is not None]
        self._head = np.array(place_of(weights.head), dtype=np.intp)
        self._eps = np.float32(config.rms_norm_eps)
        self._weights = (
            np.array(matrices, dtype=np.intp).reshape(-1, 4, 2),
            torch.stack([torch.stack((layer.input_norm, layer.mlp_norm)) for layer in layers]).numpy(),
            torch.stack(biases).numpy() if biases else np.empty((len(layers), 0), dtype=np.float32),
            torch.stack(scales).numpy() if scales else np.empty((len(layers), 0, config.head_dim), dtype=np.float32),
            self._eps,
            (config.num_heads, config.intermediate_size),
        )

    def hidden(
        self, tokens_T: Tensor, positions_T: Tensor, last: int, cache: KVCache, table: Integers, bits: Integers
    ) -> Tensor:
        """Runs all layers, as `Transformer.hidden`; `table` and `bits` are those of `attention.sequence_table`."""
        x_TC = torch.nn.functional.embedding(tokens_T, self._embedding).float()
        tables = self._tables(last + 1).numpy()
        buffers = (cache.keys.numpy(), cache.values.numpy())
        _hidden(x_TC.numpy(), positions_T.numpy(), tables, *self._weights, *buffers, table, bits)
        return x_TC

    def read(self, x_TC: Tensor, reads: Integers, suppressed: Integers) -> npt.NDArray[np.float32]:
        """Answers simple reads, [3, N], as `_read` does."""
        answers_3N, size = np.empty((3, reads.shape[1]), dtype=np.float32), self._vocab_size
        _read(x_TC.numpy(), reads, suppressed, self._final_norm, self._eps, self._head, size, answers_3N)
        return answers_3N
