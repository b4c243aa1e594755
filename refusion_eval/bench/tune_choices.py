"""What the steps of a tuning decide: the table of a card, from figures alone, and the lines that say why."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pydantic import TypeAdapter

from refusion_eval.engine.recorded import WIDTHS
from refusion_eval.models.choices import MATRICES, ONE_ORDER, SPLIT, Choices, Matrix, Product, Sizes, Switches

LEAST_GAIN = 1.01  # of time, below which a change stays out of a table
WHOLE_WIDTHS = (1, 8, 16, 40, 64)  # of whole forwards; each decides for the rows after the one before it
OF_ORDER = tuple(width for width in WHOLE_WIDTHS if width <= ONE_ORDER)  # where own products are chosen together
# The changes that are measured alone: what they set in a table.
OWN: Mapping[str, tuple[Matrix, ...]] = {"own qkv": ("qkv",), "own out, down": SPLIT, "own gate_up": ("gate_up",)}
SWITCHED = ("joins", "rotates")
TOGETHER, BASE, DECIDED, EARLY = "all of these", "base", "decided", "decided, early"
LEAST_SAME = 0.9  # share of prompts that keep their tokens in bfloat16, where rounding may tell two paths apart
_PRODUCT = TypeAdapter(Product)

Figures = Mapping[str, Mapping[str, Any]]  # of the steps, by name
Changes = Mapping[int, frozenset[str]]  # by width


def padding_of(speeds: Mapping[int, float]) -> dict[int, Product]:
    """From bytes of weights per second by rows, products by the number of rows up to which they serve."""
    found: dict[int, Product] = {}
    padded: list[int] = []
    for place, rows in enumerate(timed := sorted(speeds)):
        if place and rows - 1 > timed[place - 1]:
            found[rows - 1] = Product()  # rows between two that were timed stay as they are
        best = max(timed[place:], key=speeds.__getitem__)
        is_better = speeds[best] >= LEAST_GAIN * speeds[rows]
        found[rows] = Product(padded_to=best) if is_better else Product()
        padded += [rows] * is_better
    return {rows: product for rows, product in found.items() if rows <= max(padded, default=0)}


def group_of(width: int) -> int:
    """The most rows that share an own product with so many."""
    return max(width, ONE_ORDER)


def own_products(sweep: Mapping[str, Any]) -> dict[Matrix, dict[int, Product]]:
    """The fastest own product of each matrix, by the most rows of its group, where it was faster than torch's."""
    found: dict[Matrix, dict[int, Product]] = {}
    for matrix in MATRICES:
        for rows, best in sweep.get("best", {}).get(matrix, {}).items():
            if best["gain"] >= LEAST_GAIN:
                found.setdefault(matrix, {})[int(rows)] = _PRODUCT.validate_python(best["product"])
    return found


def table_with(changes: Changes, done: Figures) -> Choices:
    """The table with some changes at each width, without a device."""
    timed = done.get("products", {})
    padded: dict[Matrix, dict[int, Product]] = {
        matrix: padding_of({int(rows): 1 / time for rows, time in timed[matrix].items()})
        for matrix in MATRICES
        if matrix in timed
    }
    padding = Choices(products=padded)
    own = own_products(done.get("sweep", {}))
    products: dict[Matrix, dict[int, Product]] = {}
    for matrix in MATRICES:
        entries: dict[int, Product] = {}
        for before, width in pairwise((0, *WHOLE_WIDTHS)):
            chosen = own.get(matrix, {}).get(group_of(width))
            if chosen and any(matrix in OWN.get(change, ()) for change in changes[width]):
                entries[width] = chosen
            elif "rows" in changes[width] and matrix in padded:
                keys = {int(rows) for rows in timed[matrix]} | {width}
                entries |= {key: padding.product(matrix, key) for key in keys if before < key <= width}
            else:
                entries[width] = Product()
        last = max((rows for rows, product in entries.items() if product != Product()), default=0)
        if last:
            products[matrix] = {rows: entries[rows] for rows in sorted(entries) if rows <= last}
    switches = {
        width: Switches(**{name: name in of for name in SWITCHED}, early="early" in of)
        for width, of in changes.items()
        if of & {*SWITCHED, "early"} or any(changes[other] & {*SWITCHED, "early"} for other in changes if other > width)
    }
    return Choices(products=products, switches=switches)


def variants(done: Figures) -> dict[str, Changes]:
    """The tables that whole forwards are compared with: no change, each change alone, and all of them."""
    own = own_products(done.get("sweep", {}))
    alone = ["rows", *(name for name, matrices in OWN.items() if any(matrix in own for matrix in matrices)), *SWITCHED]

    def everywhere(*names: str) -> Changes:
        return dict.fromkeys(WHOLE_WIDTHS, frozenset(names))

    found = {BASE: everywhere(), **{name: everywhere(name) for name in alone}}
    return found | {TOGETHER: everywhere(*alone)}


def gains_of(times: Mapping[str, Mapping[Any, list[float]]], name: str, base: str = BASE) -> dict[int, float]:
    """How many times as fast a variant was as another one in the same round, in the middle of the rounds, by width."""
    found = {}
    for width, rounds in times.get(name, {}).items():
        found[int(width)] = statistics.median(a / b for a, b in zip(times[base][width], rounds, strict=False))
    return found


def decide(done: Figures, times: Mapping[str, Mapping[Any, list[float]]]) -> Changes:
    """The changes that made forwards faster by `LEAST_GAIN`, by width, without early launches."""
    gains = {name: gains_of(times, name) for name in times}
    chosen: dict[int, set[str]] = {width: set() for width in WHOLE_WIDTHS}
    for name in variants(done):
        if name in (BASE, TOGETHER) or not gains.get(name):
            continue
        for width in WHOLE_WIDTHS:
            # An own product is the same for all rows of its group, so that a row's sum does not depend on the width.
            widths = OF_ORDER if name in OWN and width in OF_ORDER else (width,)
            if statistics.geometric_mean(gains[name].get(one, 0.5) for one in widths) >= LEAST_GAIN:
                chosen[width].add(name)
    return {width: frozenset(names) for width, names in chosen.items()}


def with_early(changes: Changes, widths: Iterable[int] = WHOLE_WIDTHS) -> Changes:
    """The changes, with early launches at some widths."""
    return {width: of | ({"early"} if width in widths else set()) for width, of in changes.items()}


def confirmed(decided: Changes, gains: Mapping[int, float]) -> Changes:
    """The changes of those widths at which they are faster together, too; own products by the mean of their group."""
    kept = {}
    for width, names in decided.items():
        widths = OF_ORDER if width in OF_ORDER else (width,)
        is_faster = gains.get(width, 0.5) >= LEAST_GAIN
        keeps_own = statistics.geometric_mean(gains.get(one, 0.5) for one in widths) >= LEAST_GAIN
        kept[width] = frozenset(name for name in names if (keeps_own if name in OWN else is_faster))
    return kept


def skipped_of(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Widths that need not be recorded, because a forward of the next one is faster."""
    after = dict(pairwise(WIDTHS))
    return tuple(width for width, time in seconds.items() if time >= LEAST_GAIN * seconds.get(after[width], time))


def table_of(done: Figures, facts: Mapping[str, Any]) -> tuple[Choices | None, bool | None]:
    """The table of a card, None as long as it is not decided; and whether its tokens were right."""
    if "whole" not in done or "tokens" not in done:
        return None, None
    if not is_right(done["tokens"]):
        return None, False
    changes = {int(width): frozenset(names) for width, names in done["whole"]["changes"].items()}
    sizes = TypeAdapter(Sizes).validate_python(done["whole"]["sizes"])
    origin = f"gpu-check --checks tune, torch {facts['torch']}, commit {str(facts['commit'])[:12]}"
    skipped = tuple(done["whole"]["skipped"])
    table = table_with(changes, done)
    return replace(table, device=facts["device"], sizes=sizes, origin=origin, skipped=skipped), True


def is_right(tokens: Mapping[str, Any]) -> bool:
    """Two decodings with the table were equal to the bit, and agreed with forwards that were launched one by one."""
    num_same, num_prompts = map(sum, zip(*tokens["same"].values(), strict=True))
    # Rounding may turn one of a few long prompts; kernels that are wrong there turn all.
    is_half = all(same >= number / 2 for same, number in tokens["same"].values())
    return tokens["repeated"] == 1 and is_half and num_same >= LEAST_SAME * num_prompts


def summary(done: Figures, table: Choices | None) -> list[str]:
    """At most 25 lines; the last one is what was decided."""
    lines = [line for name, of in _LINES.items() if name in done for line in of(done)]
    if table is None:
        return [*lines[:24], "no table yet" if "tokens" not in done else "no table: its tokens were not right"]
    gains = {int(width): gain for width, gain in done["whole"]["gains"][DECIDED].items()}
    faster = ", ".join(f"{gains[width]:.3f} at width {width}" for width in WHOLE_WIDTHS if width in gains)
    changes = ", ".join(sorted({name for names in done["whole"]["changes"].values() for name in names})) or "nothing"
    if table.skipped:
        changes += f", no forwards of {', '.join(map(str, table.skipped))} rows"
    return [*lines[:24], f"decided: {changes}; what gained alone, together, times as fast: {faster}"]


def _of_card(done: Figures) -> Iterator[str]:
    card = done["card"]
    boundaries = ", ".join(f"{name} {1e6 * seconds:.2f} us" for name, seconds in card["boundary_seconds"].items())
    copied, read = (card[f"{way}_bytes_per_second"] / 1e12 for way in ("copy", "read"))
    yield f"copy {copied:.3f} TB/s, read {read:.3f} TB/s; an empty kernel in a graph: {boundaries}"


def _of_forward(done: Figures) -> Iterator[str]:
    for width, found in done["forward"].items():
        wall, alone = found["wall_ms"], found["device_ms"]
        gaps, num = alone - found["sum_ms"], sum(found["calls"].values())
        parts = f"{alone:.3f} ms on the device, {num:.0f} kernels of {found['sum_ms']:.3f} ms and {gaps:.3f} ms between"
        yield f"width {width}: {wall:.3f} ms, {parts}"


def _of_products(done: Figures) -> Iterator[str]:
    for matrix, times in done["products"].items():
        cells = ", ".join(f"{rows}: {1e6 * seconds:.1f}" for rows, seconds in times.items())
        yield f"{matrix}, us by rows: {cells}"
    yield _ways(done)


def _ways(done: Figures) -> str:
    base, ways = done["products"], []
    for name in (name for name in done if name.startswith("products-")):
        ratios = []
        for matrix, times in done[name].items():
            rows = next(iter(times))
            ratios.append(f"{matrix} {times[rows] / base[matrix][rows]:.3f}")
        ways.append(f"{name.removeprefix('products-')} {', '.join(ratios)}")
    return "time of one row against the default: " + "; ".join(ways or ["not measured"])


def _of_sweep(done: Figures) -> Iterator[str]:
    for matrix, by_rows in done["sweep"]["best"].items():
        cells = (f"to {rows} rows {best['gain']:.3f} ({best['name']})" for rows, best in by_rows.items())
        yield f"own {matrix}, times as fast as torch's: {', '.join(cells)}"


def _of_whole(done: Figures) -> Iterator[str]:
    cells = {
        name: f"{name}: " + ", ".join(f"{gain:.3f} at width {width}" for width, gain in gains.items())
        for name, gains in done["whole"]["gains"].items()
    }
    together = [cells.pop(name) for name in (TOGETHER, "early") if name in cells]
    yield from (cell for name, cell in cells.items() if name not in (BASE, DECIDED))
    yield "; ".join(together) or "all together: not measured"


def _of_tokens(done: Figures) -> Iterator[str]:
    tokens = done["tokens"]
    same = ", ".join(f"{name} {same} of {number}" for name, (same, number) in tokens["same"].items())
    yield f"tokens of eager forwards: {same}; the same twice: {tokens['repeated']:.0%}"


def _of_attention(done: Figures) -> Iterator[str]:
    best = ", ".join(f"{case} {found['best']} ({found['gain']:.2f})" for case, found in done["attention"].items())
    yield f"attention, fastest by rows/keys: {best}"[:400]


def _of_batches(done: Figures) -> Iterator[str]:
    speeds = ", ".join(f"{name} {speed['tokens_per_second']:.0f}" for name, speed in done["batches"].items())
    yield f"batches, tokens/s: {speeds}"


_LINES = {
    "card": _of_card,
    "forward": _of_forward,
    "products": _of_products,
    "sweep": _of_sweep,
    "whole": _of_whole,
    "tokens": _of_tokens,
    "attention": _of_attention,
    "batches": _of_batches,
}
