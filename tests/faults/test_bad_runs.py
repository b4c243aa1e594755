"""Run directories and tables that are missing, damaged or something else, through every command that reads them."""

import csv
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from refusion_eval.results.render import csv_text
from tests.faults.front_end import DATABASE


def database(change):
    """Damages the file of records."""
    return lambda folder: change(folder / DATABASE)


def statement(text):
    """Damages what the file of records holds."""

    def damage(folder):
        with closing(sqlite3.connect(folder / DATABASE)) as connection:
            assert connection.execute(text).rowcount
            connection.commit()

    return damage


def replaced_by(write):
    """Something else in the place of the run."""

    def damage(folder):
        shutil.rmtree(folder)
        write(folder)

    return damage


def another_program(folder):
    folder.mkdir()
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        connection.execute("CREATE TABLE a (b)")


def outputs_of_lm_eval(folder):
    folder.mkdir()
    (folder / "results.json").write_text("{}")
    (folder / "samples_gsm8k.jsonl").write_text("{}\n")


# What happened to the run, and words that the error must hold besides its directory.
DAMAGE = {
    "missing": (replaced_by(lambda folder: None), ("holds no records", "directory of a run")),
    "a file": (replaced_by(lambda folder: folder.write_text("hello")), ("holds no records", "directory of a run")),
    "empty": (replaced_by(Path.mkdir), ("holds no records", "directory of a run")),
    "outputs of lm-eval": (replaced_by(outputs_of_lm_eval), ("holds no records", "directory of a run")),
    "another program's": (replaced_by(another_program), ("of another program", "another run directory")),
    "a folder for records": (
        replaced_by(lambda folder: (folder / DATABASE).mkdir(parents=True)),
        ("holds no records", "directory of a run"),
    ),
    "an empty file": (database(lambda path: path.write_bytes(b"")), ("its records are gone", "restore")),
    "garbage": (database(lambda path: path.write_bytes(b"no database" * 500)), ("damaged", "restore")),
    "cut": (database(lambda path: path.write_bytes(path.read_bytes()[:9000])), ("damaged", "restore")),
    "a sample that is no JSON": (statement("UPDATE samples SET body = '{oops'"), ("record is damaged", "restore")),
    "a sample that is a list": (statement("UPDATE samples SET body = '[]'"), ("record is damaged", "restore")),
    "a sample without a key": (statement("UPDATE samples SET body = '{}'"), ("record is damaged", "restore")),
    "a sample with a text for a number": (
        statement("""UPDATE samples SET body = json_set(body, '$.seconds', 'long')"""),
        ("record is damaged", "restore"),
    ),
}
COMMANDS = {
    "table": ("table", "RUN"),
    "compare": ("compare", "SOUND", "RUN"),
    "report": ("report", "RUN", "--out", "OUT.html"),
    "export": ("export", "RUN", "--out", "OUT.jsonl"),
    "export lm-eval": ("export", "RUN", "--format", "lm-eval", "--out", "OUT"),
    "leaderboard": ("leaderboard", "RUN", "--out", "OUT"),
    "replay": ("replay", "RUN", "--out", "OUT.gif"),
    "plot figure5": ("plot", "figure5", "RUN", "--out", "OUT"),
    "plot figure9": ("plot", "figure9", "RUN", "--out", "OUT"),
    "claims": ("claims", "RUN", "--out", "OUT"),
    "speed": ("speed", "RUN", "--csv", "OUT.csv"),
    "paper-table": ("paper-table", "all", "RUN", "--out", "OUT"),
    "rerun": ("rerun", "RUN", "--out", "OUT"),
    "rescore": ("rescore", "RUN", "--filter", "strict"),
}


def files(folder):
    """Every file below; but for what SQLite keeps beside a database that is open."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(f"{DATABASE}-"))


@pytest.fixture
def refused(front_end, calm, tmp_path):
    """Damages a copy of the run, gives it to a command, and returns the error; nothing is written."""

    def run(name, damage):
        bad = tmp_path / "bad"
        shutil.copytree(calm, bad)
        damage(bad)
        before = files(tmp_path), (calm / DATABASE).read_bytes()
        words = {"RUN": bad, "SOUND": calm}
        message = front_end.refusal(
            *(words.get(word, word.replace("OUT", f"{tmp_path}/out")) for word in COMMANDS[name])
        )
        assert (files(tmp_path), (calm / DATABASE).read_bytes()) == before
        return message, str(bad)

    return run


@pytest.mark.parametrize("damaged", DAMAGE)
def test_a_run_that_cannot_be_read_is_one_error_that_says_why(damaged, refused):
    damage, words = DAMAGE[damaged]
    message, place = refused("table", damage)
    assert all(word in message for word in (place, *words)), message


@pytest.mark.parametrize("damaged", ["missing", "garbage", "a sample that is no JSON"])
@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"table"}))
def test_every_command_refuses_it_and_writes_nothing(name, damaged, refused):
    damage, words = DAMAGE[damaged]
    message, place = refused(name, damage)
    assert all(word in message for word in (place, *words)), message


@pytest.mark.parametrize(
    "name", ["table", "compare", "export", "report", "claims", "speed", "paper-table", "rerun", "rescore"]
)
def test_a_damaged_score_is_an_error_too(name, refused):
    message, place = refused(name, statement("UPDATE scores SET body = '{}'"))
    assert place in message
    assert "record is damaged" in message


def test_a_damaged_trace_is_an_error_where_it_is_read(refused):
    message, place = refused("replay", statement("UPDATE samples SET trace = x'7a00'"))
    assert place in message
    assert "the stored trace of mini_gsm8k 0 is damaged" in message


TABLES = {
    "empty": (b"", "holds no rows"),
    "a text": (b"hello", "holds no rows"),
    "another's": (b"a,b\n1,2\n", "lacks the columns run_id"),
    "Latin-1": ("é,b\n1,2\n".encode("latin-1"), "cannot be read"),
    "binary": (bytes(range(256)) * 10, "cannot be read"),
    "an open quote": (b'a,"b\n1,2', "holds no rows"),
}


@pytest.mark.parametrize("content", TABLES)
@pytest.mark.parametrize("name", ["claims", "paper-table"])
def test_a_results_table_that_is_none_is_one_error(content, name, front_end, tmp_path):
    written, words = TABLES[content]
    path = tmp_path / "results.csv"
    path.write_bytes(written)
    arguments = ("claims", path) if name == "claims" else ("paper-table", "all", path)
    message = front_end.refusal(*arguments, "--out", tmp_path / "out")
    assert str(path) in message
    assert words in message
    assert "table command" in message
    assert files(tmp_path / "out") == []


@pytest.mark.parametrize("damage", ["header alone", "short row", "texts for numbers"])
def test_a_damaged_results_table_is_one_error(damage, calm, front_end, tmp_path):
    header, row = (calm / "results.csv").read_text().splitlines()[:2]
    rows = {"header alone": "", "short row": "x,y", "texts for numbers": ",".join("x" for _ in row.split(","))}
    path = tmp_path / "results.csv"
    path.write_text(f"{header}\n{rows[damage]}\n")
    message = front_end.refusal("claims", path, "--out", tmp_path / "out")
    assert str(path) in message
    assert "table command" in message


@pytest.mark.parametrize("row", ["", "a,0.5,no,gsm8k,x,1,1,1,1,1", "a,0.5,no,gsm8k,1,1,1,1,1,inf", "a,0.5"])
def test_a_damaged_locality_file_is_one_error(row, front_end, tmp_path):
    path = tmp_path / "locality.csv"
    head = "decoder,masking_ratio,mini,dataset,distance,jsd_mean,ci_low,ci_high,n_pairs,n_responses"
    path.write_text(f"{head if row else 'masking_ratio'}\n{row or 1}\n")
    message = front_end.refusal("claims", path, "--out", tmp_path / "out")
    assert str(path) in message
    assert "make it again" in message


def test_a_setting_of_another_kind_is_shown_as_it_is(calm, front_end, tmp_path):
    head, *rows = csv.reader((calm / "results.csv").read_text().splitlines())
    at = head.index("setting_block_size")
    (tmp_path / "results.csv").write_text(csv_text(head, [[*row[:at], "eight", *row[at + 1 :]] for row in rows]))
    assert front_end.run("paper-table", "6", tmp_path / "results.csv", "--out", tmp_path / "out")[0] == 0
    assert "eight" in (tmp_path / "out" / "table6_mini.md").read_text()


@pytest.mark.parametrize("number", [3, 4, 6, 7, 8])
@pytest.mark.parametrize("content", ["missing", b"", b"a,b\n1,2\n", bytes(range(256))])
def test_figures_of_other_files_are_one_error(number, content, front_end, tmp_path):
    path = tmp_path / "figures.csv"
    if content != "missing":
        path.write_bytes(content)
    message = front_end.refusal("plot", f"figure{number}", path, "--out", tmp_path / "out")
    assert str(path) in message
    assert files(tmp_path / "out") == []


# Arguments that name something else than they have to; words of the error.
ARGUMENTS = {
    "no such figure": (("plot", "figure77", "SOUND"), ("figure77", "did you mean figure7")),
    "no such task of a plot": (("plot", "figure5", "SOUND", "--task", "nope", "--out", "OUT"), ("nope",)),
    "no such item of a plot": (("plot", "figure5", "SOUND", "--item", "nope", "--out", "OUT"), ("nope",)),
    "a file for figures": (("plot", "figure5", "SOUND", "--out", "FILE"), ("FILE",)),
    "no such task": (("replay", "SOUND", "--task", "nope"), ("nope", "mini_gsm8k")),
    "no such sample": (("replay", "SOUND", "--sample", "nope"), ("nope",)),
    "no such number": (("replay", "SOUND", "--number", "99"), ("99",)),
    "an unknown ending": (("replay", "SOUND", "--out", "OUT.mp4"), (".mp4", ".gif")),
    "a folder for a picture": (("replay", "SOUND", "--out", "FOLDER"), ("FOLDER",)),
    "a picture in a file": (("replay", "SOUND", "--out", "FILE/x.gif"), ("FILE",)),
    "nothing to replay": (("replay",), ("run",)),
    "no such baseline": (("table", "SOUND", "--baseline", "nope"), ("nope",)),
    "a folder for a table": (("table", "SOUND", "--csv", "FOLDER"), ("FOLDER", "cannot be written")),
    "a folder for a page": (("report", "SOUND", "--out", "FOLDER"), ("FOLDER", "cannot be written")),
    "a page in a file": (("report", "SOUND", "--out", "FILE/x.html"), ("FILE", "cannot be written")),
    "no rows of a report": (("report", "SOUND", "--data", "MISSING", "--out", "OUT.html"), ("MISSING", "--data")),
    "a file for the rows": (("report", "SOUND", "--data", "FILE", "--out", "OUT.html"), ("FILE", "--data")),
    "no rows of a rerun": (("rerun", "SOUND", "--data", "MISSING", "--out", "OUT"), ("MISSING", "--data")),
    "a file for a rerun": (("rerun", "SOUND", "--out", "FILE"), ("FILE",)),
    "a folder for a comparison": (("compare", "SOUND", "SOUND", "--csv", "FOLDER"), ("FOLDER", "cannot be written")),
    "a file for claims": (("claims", "--out", "FILE"), ("FILE",)),
    "no such paper table": (("paper-table", "table99", "SOUND", "--out", "OUT"), ("table99", "1 to 8")),
    "no such sweep": (("sweep", "MISSING", "--out", "OUT"), ("MISSING",)),
    "a folder for a sweep": (("sweep", "FOLDER", "--out", "OUT"), ("FOLDER",)),
    "a sweep in a file": (("sweep", "mini_figure4", "--out", "FILE"), ("FILE",)),
    "no such task of a sweep": (("sweep", "mini_figure4", "--tasks", "nope", "--out", "OUT"), ("nope",)),
    "a batch of a sweep": (("sweep", "mini_figure4", "--batch-size", "many", "--out", "OUT"), ("many",)),
    "no rows of a sweep": (("sweep", "mini_figure4", "--data", "FILE", "--out", "OUT"), ("FILE", "--data")),
    "no rows for the doctor": (("doctor", "--data", "MISSING"), ("MISSING", "--data")),
    "no such model of a bench": (("bench", "--model", "MISSING"), ("MISSING",)),
    "an empty model of a bench": (("bench", "--model", "FOLDER"), ("FOLDER", "config.json")),
    "no such device of a bench": (("bench", "--device", "tpu"), ("tpu",)),
    "no such type of a bench": (("bench", "--dtype", "int3"), ("int3", "bfloat16")),
    "slots that fill no block": (("bench", "--slot-size", "7", "--block-size", "32"), ("7", "32")),
    "nothing to convert": (("convert", "MISSING", "OUT", "--to", "stock"), ("MISSING",)),
    "no such model of a locality": (("locality", "--model", "FOLDER", "--out", "OUT.csv"), ("FOLDER", "config.json")),
    "a table of a locality in a file": (("locality", "--out", "FILE/x.csv"), ("FILE", "cannot be written")),
    "rows of a plot of runs": (("plot", "figure5", "SOUND", "--data", "FOLDER"), ("--data", "--model")),
    "an item of a plot of tables": (("plot", "figure1", "SOUND", "--item", "1"), ("--item", "figures 5 and 9")),
    "two choices of rows": (("paper-table", "1", "SOUND", "--row", "a", "--rows", "b"), ("--rows", "--row")),
    "a task of a paper table": (("paper-table", "1", "SOUND", "--task", "gsm8k"), ("--task", "Table 8")),
    "a baseline of samples": (("export", "SOUND", "--baseline", "SOUND"), ("--baseline", "other formats")),
    "a file of an estimate": (("bench", "--predict", "H100", "--out", "OUT"), ("--out", "--predict")),
    "a bench's figures in a file": (("bench", "--out", "FILE/x"), ("FILE", "cannot be written")),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_names_something_else_is_one_error(name, calm, front_end, tmp_path):
    arguments, words = ARGUMENTS[name]
    names = {"SOUND": calm, "FILE": tmp_path / "file", "FOLDER": tmp_path / "folder", "MISSING": tmp_path / "missing"}
    names["FILE"].write_text("what was there")
    names["FOLDER"].mkdir()
    texts = []
    for text in (*arguments, *words):
        for word, place in {**names, "OUT": tmp_path / "out"}.items():
            text = text.replace(word, str(place))
        texts.append(text)
    before = (calm / DATABASE).read_bytes()
    message = front_end.refusal(*texts[: len(arguments)])
    assert all(word in message for word in texts[len(arguments) :]), message
    assert names["FILE"].read_text() == "what was there"
    assert not list(names["FOLDER"].iterdir())
    assert (calm / DATABASE).read_bytes() == before
