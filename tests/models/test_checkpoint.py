"""A checkpoint that cannot be found gives one clear error with what to do."""

from unittest.mock import Mock

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from refusion_eval.errors import CheckpointError
from refusion_eval.models import location as location_module
from refusion_eval.models.location import fetch_weights, locate


def test_a_local_directory_is_taken_as_it_is(tmp_path):
    location = locate(str(tmp_path), None)
    assert (location.directory, location.revision) == (tmp_path, None)
    fetch_weights(location)


@pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "~/nowhere_at_all", "a/b/c", ""])
def test_missing_directory(name):
    with pytest.raises(CheckpointError, match="no directory"):
        locate(name, None)
    with pytest.raises(CheckpointError, match="no file 'model"):  # the hub is not asked
        locate("model.gguf", None)


def test_revision_is_for_hub_ids(tmp_path):
    with pytest.raises(CheckpointError, match="local directory"):
        locate(str(tmp_path), "main")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (GatedRepoError("gated", response=Mock()), "accept its terms"),
        (RepositoryNotFoundError("unknown", response=Mock()), "check the spelling"),
        (RevisionNotFoundError("unknown", response=Mock()), "no revision 'v9'"),
        (LocalEntryNotFoundError("offline"), "the hub cannot be reached"),
        (ConnectionError("offline"), "the hub cannot be reached"),
    ],
)
def test_hub_failures_say_what_to_do(monkeypatch, error, advice):
    monkeypatch.setattr(location_module, "snapshot_download", Mock(side_effect=error))
    with pytest.raises(CheckpointError, match=advice):
        locate("someone/model", "v9")


def test_weights_are_fetched_from_the_commit_of_the_small_files(monkeypatch, tmp_path):
    snapshot = tmp_path / "0123abc"
    download = Mock(return_value=str(snapshot))
    monkeypatch.setattr(location_module, "snapshot_download", download)
    location = locate("someone/model", "main")
    fetch_weights(location)
    assert [call.kwargs["revision"] for call in download.call_args_list] == ["main", "0123abc"]
    assert location.revision == "0123abc"
