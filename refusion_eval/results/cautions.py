"""Cautions: what a reader must know of a number, made once from its conditions, and the sentences that views show."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeVar

from refusion_eval.benchmarks import OTHER, OURS
from refusion_eval.store.records import SERVER

_Statement = TypeVar("_Statement")

# Which numbers of a task a caution is about: all of them, or speeds alone.
Scope = Literal["task", "speed"]

MINI_NOTE = "synthetic look-alike, not the real benchmark"
MINI_SENTENCE = "Mini tasks are synthetic look-alikes, not the real benchmarks, and compare with no published figure."
FEWER = "fewer items"
FEWER_SENTENCE = "Fewer items: other runs of that task have more, so its rows do not rest on the same items."
UNTEMPLATED = "without --model no chat template was applied, and tokens are the server's own count (usage)"
SERVERS_TEMPLATE = "prompts are conversations, to which the server applied its own chat template"
UNISOLATED = "programs ran without isolation (--sandbox none), so their verdicts can be forged"
CARDS_SENTENCE = (
    "Scores were measured on several cards (GPUs or processors), and a score moves with the card: a row that was "
    "measured on another card differs by that too (the command flips shows how far)."
)
_CUT = "Cut short: responses that reached the length of the settings, and so may lack their answer."
_ONE = "One answer: most answers to the choices are the same letter, as of a model that guesses"
_COLLAPSED = "Collapsed: answers that are empty, repeat themselves, keep special tokens or are in another script"
_OTHER_PROMPTS = "Other prompts: neither those of this project nor those of the release."
_SLOWED = "Speed is lower than need be: "


class Caution(NamedTuple):
    """A caution about the numbers of a task or of a mean.

    Attributes:
        kind: what views mark the numbers with.
        sentence: the caution as a sentence of its own.
        amount: how many samples it is about, as 2 or as `26 of 40`; empty where that does not matter.
        advice: the command that removes the cause; empty for none.
    """

    kind: str
    sentence: str
    amount: str = ""
    scope: Scope = "task"
    advice: str = ""

    @property
    def label(self) -> str:
        """Kind and amount, as `2 errors` or `limited 3 of 5`."""
        parts = (self.amount, self.kind) if self.amount.isdecimal() else (self.kind, self.amount)
        return " ".join(filter(None, parts))

    @property
    def note(self) -> str:
        """The sentence as one of several between semicolons."""
        return self.sentence.rstrip(".").replace("; ", ", ")


class Conditions(NamedTuple):
    """What the records know of how a number was measured; several texts of one field are joined by `|`."""

    place: tuple[Any, ...] = ()  # run, task and what tells its rows apart: what is counted is counted once a place
    run_id: str = ""
    command: str = ""
    task: str = ""
    is_mean: bool = False  # over tasks or seeds, which say themselves what they lack
    is_score: bool = False
    is_speed: bool = False
    mini: bool = False
    unfinished: str = ""
    limited: str = ""
    missing: str = ""
    errors: int = 0  # those that were refused included
    num_refused: int = 0
    unscored: str = ""
    isolated: bool = True
    num_cut: int = 0
    one_answer: str = ""
    collapsed: str = ""
    prompts: str = OURS
    batch_size: str = ""
    hardware: str = ""
    card: str = ""
    same_decode_as: str = ""
    fused: bool = False
    counts_encoder: bool = False
    num_rounds: int = 0
    slowed_by: str = ""
    attention: str = ""
    server_notes: str = ""
    protocol: str = ""

    @classmethod
    def of(cls, source: object, **told: Any) -> Self:
        """The conditions that are attributes of an object, and others that are told."""
        names = (name for name in cls._fields if name not in told and hasattr(source, name))
        return cls(**{name: getattr(source, name) for name in names}, **told)

    @staticmethod
    def joined(entries: Sequence[Any]) -> dict[str, Any]:
        """What holds of several numbers together, such as those of a mean, by the names of their fields."""
        together: dict[str, Any] = {name: sum(getattr(entry, name) for entry in entries) for name in _COUNTS}
        for name, mark in _LISTS.items():
            parts = {part for entry in entries for part in getattr(entry, name).split(mark)}
            together[name] = mark.join(sorted(parts - {""}))
        isolated, rounds = all(entry.isolated for entry in entries), min(entry.num_rounds for entry in entries)
        return together | {"isolated": isolated, "num_rounds": rounds}


_COUNTS = ("errors", "num_refused", "num_cut")
_LISTS = dict.fromkeys(
    ("unfinished", "limited", "one_answer", "collapsed", "prompts", "protocol", "slowed_by", "server_notes"), "|"
)
_LISTS |= dict.fromkeys(("hardware", "card"), " | ")


def cautions(of: Conditions) -> list[Caution]:
    """The cautions about one number, in the order in which views mark it."""
    if of.missing:
        return [Caution("no rows", _missing(of))]
    unfinished, limited = (_listed(text) for text in (of.unfinished, of.limited))
    amounts = ("", "") if of.is_mean else (unfinished, limited)  # its tasks say how much
    num_failed, machines = of.errors - of.num_refused, of.hardware.split(" | ")
    are_together = any(size not in ("", "1") for size in of.batch_size.split("|"))
    why = "the run ended early or is still going"
    together = "Some samples were decoded together; their times are in no speed figure."
    statements = {
        Caution("unfinished", f"{unfinished} samples: {why}.", amounts[0], advice=of.command): unfinished,
        Caution("limited", f"{limited} samples of the task were asked for.", amounts[1]): limited,
        **dict.fromkeys(
            (Caution(kind, _sentence(UNTEMPLATED)) for kind in ("no chat template", "tokens by server usage")),
            UNTEMPLATED in of.server_notes.split("|"),
        ),
        Caution("server's template", _sentence(SERVERS_TEMPLATE)): SERVERS_TEMPLATE in of.server_notes.split("|"),
        Caution("errors", f"{num_failed} samples failed and are in no figure.", str(num_failed)): num_failed,
        Caution("refused", f"{of.num_refused} {_REFUSED}.", str(of.num_refused)): of.num_refused,
        Caution("unscored", f"{of.unscored} samples have no verdict: the run has not ended.", of.unscored): of.unscored,
        Caution("same decode as", f"{of.same_decode_as} has the same tokens and forwards.", of.same_decode_as): (
            of.same_decode_as
        ),
        Caution("no isolation", _sentence(UNISOLATED)): not of.isolated,
        Caution("cut short", _CUT, str(of.num_cut)): of.num_cut,
        Caution("one answer", f"{_ONE} ({of.one_answer}).", "" if of.is_mean else of.one_answer): of.one_answer,
        Caution(
            "collapsed", f"{_COLLAPSED} ({_listed(of.collapsed)}).", of.collapsed.partition(":")[0] * (not of.is_mean)
        ): (of.collapsed),
        Caution("other prompts", _OTHER_PROMPTS): OTHER in of.prompts.split("|"),
        Caution("mixed hardware", f"Samples of this task come from several machines: {of.hardware}."): (
            len(machines) > 1 and not of.is_mean
        ),
        Caution("slowed", f"{_SLOWED}{_listed(of.slowed_by)}.", scope="speed"): of.slowed_by,
        Caution("batched", together, scope="speed"): are_together,
    }
    return that_hold(statements)


_REFUSED = "prompts were refused, for example as too long for the context, and are in no figure"


def sentences(entries: Iterable[Conditions], *, marked: bool = False) -> list[str]:
    """What is said below or above some numbers; with `marked`, without what marks beside each number say."""
    entries = list(entries)
    mini = [MINI_SENTENCE] if any(of.mini for of in entries) else []
    cards = [CARDS_SENTENCE] if len({of.card for of in entries if of.is_score and of.card}) > 1 else []
    return [*([] if marked else _of_samples(entries)), *mini, *cards, *_of_speeds(entries)]


def extent_sentences(entries: Iterable[Conditions]) -> list[str]:
    """Sentences about runs that lack samples, with the commands that continue them, missing rows, and limits."""
    unfinished: dict[tuple[str, str], dict[str, None]] = {}
    limited: dict[str, dict[str, dict[str, None]]] = {}
    missing: dict[str, None] = {}
    for of in entries:
        if of.missing:
            missing[_missing(of)] = None
        elif of.unfinished:
            unfinished.setdefault((of.run_id, of.command), {})[f"{of.task} {of.unfinished}"] = None
        if of.limited:
            limited.setdefault(of.task, {}).setdefault(of.limited, {})[of.run_id] = None
    of_runs = [
        f"{run_id} is unfinished: {', '.join(tasks)} samples are there (to continue it: {command or 'run it again'})."
        for (run_id, command), tasks in unfinished.items()
    ]
    texts = [
        f"{task} {text}" + (f" ({', '.join(runs)})" if len(by_text) > 1 else "")
        for task, by_text in limited.items()
        for text, runs in by_text.items()
    ]
    return [*of_runs, *missing, *([f"Limited: {', '.join(texts)} samples were asked for."] if texts else [])]


def _of_samples(every: Sequence[Conditions]) -> list[str]:
    """Sentences about samples that are missing, failed, cut or judged without isolation, and about their prompts."""
    tasks = {of.place: of for of in every if not of.is_mean}.values()
    num_refused = sum(of.num_refused for of in tasks)
    num_errors = sum(of.errors for of in tasks) - num_refused
    statements = {
        f"{num_errors} samples are errors and in no figure; run the same command again to retry them.": num_errors,
        f"{num_refused} {_REFUSED}.": num_refused,
        f"No isolation: {UNISOLATED}.": not all(of.isolated for of in every),
        _CUT: any(of.num_cut for of in every),
        f"{_ONE}.": any(of.one_answer for of in every),
        f"{_COLLAPSED}.": any(of.collapsed for of in every),
        _OTHER_PROMPTS: any(OTHER in of.prompts.split("|") for of in every),
    }
    return [*extent_sentences(of for of in every if not of.is_mean), *that_hold(statements)]


def _of_speeds(entries: Sequence[Conditions]) -> list[str]:
    """Sentences about protocols and servers, and about what the records know of measured speeds."""
    speeds = [of for of in entries if of.is_speed]
    slowed = sorted({text for of in speeds for text in of.slowed_by.split("|")} - {""})
    kernels = sorted({of.attention for of in speeds} - {"", SERVER})  # those of a server are not known
    of_servers = sorted({text for of in entries for text in of.server_notes.split("|")} - {""})
    protocols = sorted({name for of in entries for name in of.protocol.split("|")} - {""})
    in_rounds = {of.num_rounds > 1 for of in speeds if of.num_rounds}
    statements = {
        f"Protocol{'s' * (len(protocols) > 1)}: {', '.join(protocols)}.": protocols,
        "Intervals of speed also cover the rounds in which the systems took turns.": True in in_rounds,
        "A speed of one round has an interval that leaves out changes of the machine's own speed.": False in in_rounds,
        f"{_SLOWED}{', '.join(slowed)}.": slowed,
        f"Attention was computed by different kernels ({', '.join(kernels)}).": len(kernels) > 1,
        "Fused: fewer forwards for the same tokens than the paper's algorithm makes.": any(of.fused for of in entries),
        "TPF of DiffusionGemma counts the forwards of its encoder too; tpf_decoder leaves them out.": any(
            of.counts_encoder for of in entries
        ),
        f"Server: {'; '.join(of_servers)}.": of_servers,
    }
    return that_hold(statements)


def _missing(of: Conditions) -> str:
    return f"{of.task} was not asked, because there are no rows of it: {of.missing}."


def _listed(text: str) -> str:
    return text.replace("|", ", ")


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}."


def that_hold(statements: Mapping[_Statement, object]) -> list[_Statement]:
    """The statements whose conditions are true, in their order."""
    return [statement for statement, holds in statements.items() if holds]
