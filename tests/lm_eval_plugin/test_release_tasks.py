"""The task files with the prompts of the release: the same texts, stop strings and versions through both doors."""

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks import TaskManager, get_task_dict

from refusion_eval.benchmarks import OTHER, OURS, RELEASE, RELEASED, Task, find_task
from refusion_eval.lm_eval_plugin.adapter import RefusionLM
from refusion_eval.paths import tasks_path

ROWS = Path(__file__).parents[1] / "data" / "release_prompts" / "prompts.jsonl"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The seven tasks with one row each."""
    data = tmp_path_factory.mktemp("data")
    for line in map(json.loads, ROWS.read_text(encoding="utf-8").splitlines()):
        name = line["benchmark"]
        (data / name).mkdir()
        (data / name / f"{RELEASED[name].source.split}.jsonl").write_text(json.dumps(line["row"]) + "\n")
    manager = TaskManager(include_path=str(tasks_path()), include_defaults=False, metadata={"data_dir": str(data)})
    tasks: dict[str, Any] = get_task_dict([Task(released).name for released in RELEASED.values()], manager)
    return tasks


@pytest.mark.parametrize("name", RELEASED)
def test_lm_eval_sends_the_turns_of_the_benchmark(loaded: dict[str, Any], name: str) -> None:
    released = RELEASED[name]
    task = loaded[Task(released).name]
    (row,) = task.test_docs()
    sent = task.fewshot_context(
        row,
        0,
        apply_chat_template=True,
        chat_template=lambda messages, add_generation_prompt: json.dumps([messages, add_generation_prompt]),
        gen_prefix=task.doc_to_prefix(row),
    )
    messages, add_generation_prompt = json.loads(sent)
    by_role = {message["role"]: message["content"] for message in messages}
    user, system, opened, *_ = released.turns(row)
    assert by_role == {role: text for role, text in (("system", system), ("user", user), ("assistant", opened)) if text}
    assert add_generation_prompt == (not opened)
    assert task.config.generation_kwargs == {"until": list(released.prompts.stop_strings)}
    assert str(task.VERSION) == released.prompts.version
    assert task.config.filter_list[0]["name"] == released.default_filter


def test_gpqa_stays_sealed(loaded: dict[str, Any]) -> None:
    task = loaded["refusion_gpqa_release"]
    (row,) = task.test_docs()
    prompt, sealed = task.dataset.sealing.unseal(RELEASED["gpqa"].turns(row).user)
    assert "invented ion" not in json.dumps(row)
    assert "invented ion" in prompt
    assert len(sealed) == 5


def test_the_model_sees_whose_prompts_it_is_asked_with() -> None:
    model = RefusionLM.create_from_arg_string("pretrained=embedded")
    row = {"question": "How many?", "answer": "#### 5"}
    for name, prompts in (("refusion_gsm8k", OURS), ("refusion_gsm8k_release", RELEASE)):
        task = find_task(name)
        assert task is not None
        prompt = model.system.render_turns(task.benchmark.turns(row))
        assert model._prompts_name(name, row, prompt) == prompts
        assert model._prompts_name(name, row, f"An example.\n{prompt}") == OTHER
    assert model._prompts_name("gsm8k_cot", row, "Q: How many?\nA:") == OTHER
