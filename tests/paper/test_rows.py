"""Files that figures are drawn from."""

from refusion_eval.paper.rows import Point, is_rows_file, read_rows, write_rows


def test_a_file_of_a_version_with_fewer_columns_is_read(tmp_path):
    path = tmp_path / "figure.csv"
    write_rows(
        path, Point, [Point(panel="a", series="s", label="S", metric="m", x=1.0, y=2.0, note="n", limited="1 of 2")]
    )
    lines = [line.split(",") for line in path.read_text().splitlines()]
    num_columns = lines[0].index("note") + 1
    path.write_text("".join(f"{','.join(line[:num_columns])}\n" for line in lines))
    assert is_rows_file(path, Point)
    (point,) = read_rows(path, Point)
    assert (point.note, point.limited) == ("n", "")
    path.write_text("panel,series,label\na,s,S\n")
    assert not is_rows_file(path, Point)
