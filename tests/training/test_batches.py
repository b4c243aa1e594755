"""The batches of a run, and what a step costs (`refusion_eval.training.data.batches`, `flops`)."""

from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.training.config import Objective, ObjectiveConfig, OptimisationConfig
from refusion_eval.training.cost import TrainingCost
from refusion_eval.training.data.batches import ProcessRank, StepBatches, StepPlan, corruption_rng
from refusion_eval.training.data.collate import Normalisation, collate
from refusion_eval.training.objectives.example import Example, TrainingSample
from refusion_eval.training.objectives.loss import hybrid_loss
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds, num_rows
from tests.training.tiny import EOS, MASK, random_model

IDS = SpecialIds(eos=EOS, mask=MASK)
ALONE = ProcessRank(0, 1)
SETTINGS = {
    "refusion": {"slot_sizes": (2, 4), "eos_multiple": 4, "mdm_weight": 0.5},
    "llada": {"eos_multiple": 6},
    "bd3lm": {"eos_multiple": 4, "block_size": 2},
    "idlm": {"block_size": 3},
    "wedlm": {"eos_multiple": 4, "block_size": 3, "mdm_weight": 0.5},
}


def config_of(objective: Objective, **more: object) -> ObjectiveConfig:
    return ObjectiveConfig(objective=objective, **{**SETTINGS.get(objective, {}), **more})  # type: ignore[arg-type]


class Samples(Sequence[TrainingSample]):
    """In memory, with what is read of a token cache."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        rng = np.random.default_rng(0)
        self._samples = [
            TrainingSample(tuple(rng.integers(20, size=a).tolist()), (*rng.integers(20, size=b - 1).tolist(), EOS))
            for a, b in sizes
        ]
        self.prompt_lengths = np.array([a for a, _ in sizes])
        self.lengths = np.array([a + b for a, b in sizes])

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._samples[index]


SAMPLES = Samples([(1 + n % 5, 1 + (7 * n) % 11) for n in range(19)])


def batches(config: ObjectiveConfig, num_forwards: int, process: ProcessRank = ALONE) -> StepBatches:
    rows = num_rows(config, SAMPLES.prompt_lengths, SAMPLES.lengths - SAMPLES.prompt_lengths)
    batch = {"global_batch_size": 12, "micro_batch_size": 3, "num_forwards": num_forwards}
    plan = StepPlan(rows, OptimisationConfig(max_steps=2, seed=5, **batch))
    return StepBatches(SAMPLES, config, IDS, plan, 2, process)  # type: ignore[arg-type]


@pytest.mark.parametrize("objective", get_args(Objective))
@given(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=8))
def test_rows_and_pairs_are_those_of_the_examples(objective: Objective, sizes: list[tuple[int, int]]) -> None:
    config, samples = config_of(objective), Samples(sizes)
    rng = np.random.default_rng(1)
    examples = [OBJECTIVES[objective](sample, rng, config, IDS) for sample in samples]
    lengths = num_rows(config, samples.prompt_lengths, samples.lengths - samples.prompt_lengths)
    assert lengths.tolist() == [len(example.tokens) for example in examples]
    assert [example.num_visible_pairs() for example in examples] == [
        int(mask_of(example).sum()) for example in examples
    ]


def mask_of(example: Example) -> np.ndarray:
    if example.visibility is None:
        return np.tri(len(example.tokens), dtype=bool)
    return example.visibility.mask()


@pytest.mark.parametrize(
    ("objective", "normalisation"),
    [
        ("sft", "release"),
        ("refusion", "release"),
        ("refusion", "paper"),
        ("llada", "release"),
        ("bd3lm", "release"),
        ("idlm", "release"),
        ("wedlm", "release"),
    ],
)
def test_the_mean_over_forwards_is_the_mean_over_micro_batches(
    objective: Objective, normalisation: Normalisation
) -> None:
    config, model = config_of(objective, normalisation=normalisation), random_model()
    alone = batches(config, 1)
    groups = alone._plan.groups(1)
    losses = []
    for group in groups:
        examples = [OBJECTIVES[objective](SAMPLES[d.sample], corruption_rng(5, d), config, IDS) for d in group]
        losses.append(
            hybrid_loss(model, collate([examples], normalisation=normalisation), mdm_weight=config.mdm_weight)
        )
    expected = torch.stack([loss.total for loss in losses]).mean()
    for num_forwards in (1, 2, 3, 4):
        parts = batches(config, num_forwards)
        forwards = [parts[num_forwards + turn] for turn in range(num_forwards)]
        totals = [hybrid_loss(model, part["batch"], mdm_weight=config.mdm_weight).total for part in forwards]
        torch.testing.assert_close(torch.stack(totals).mean(), expected)
        assert sum(part["num_tokens"] for part in forwards) == sum(
            SAMPLES[draw.sample].length for group in groups for draw in group
        )


def test_lambda_weighs_the_second_term() -> None:
    model, (batch,) = random_model(), [batches(config_of("refusion"), 1)[0]["batch"]]
    losses = hybrid_loss(model, batch, mdm_weight=0.25)
    assert losses.total.item() == pytest.approx((losses.ar + 0.25 * losses.mdm).item(), rel=1e-6)
    assert losses[1:] == hybrid_loss(model, batch)[1:]


def test_processes_hold_the_forwards_of_one() -> None:
    config = config_of("refusion")
    alone = batches(config, 4)
    ranks = [batches(config, 4, ProcessRank(rank, 2)) for rank in range(2)]
    assert [len(alone), *map(len, ranks)] == [8, 4, 4]
    for index in range(8):
        one, other = alone[index]["batch"], ranks[index % 2][index // 2]["batch"]
        assert torch.equal(one.tokens_T, other.tokens_T)
        assert torch.equal(one.ar.weights_R, other.ar.weights_R)


def test_epochs_are_corrupted_anew() -> None:
    config = config_of("llada")
    tokens = [batches(config, 1)[step]["batch"].tokens_T for step in range(2)]
    assert not torch.equal(tokens[0][: len(tokens[1])], tokens[1][: len(tokens[0])])
    assert torch.equal(batches(config, 1)[1]["batch"].tokens_T, tokens[1])


def test_workers_prepare_what_the_process_itself_would() -> None:
    parts = batches(config_of("bd3lm"), 2)
    for ours, theirs in zip(parts.loader(0), parts.loader(1), strict=True):
        assert torch.equal(ours["batch"].tokens_T, theirs["batch"].tokens_T)
        assert ours["num_pairs"] == theirs["num_pairs"]


def test_groups_in_a_pack_keep_their_weights() -> None:
    config, rng = config_of("refusion"), np.random.default_rng(2)
    examples = [OBJECTIVES["refusion"](sample, rng, config, IDS) for sample in SAMPLES[:6]]
    packed = collate([examples[:2], examples[2:]], num_groups=2)
    alone = [collate([examples[:2]]), collate([examples[2:]])]
    for name in ("ar", "mdm"):
        weights = torch.cat([getattr(batch, name).weights_R for batch in alone])
        torch.testing.assert_close(getattr(packed, name).weights_R, weights / 2)


def test_the_cost_of_a_step_by_hand() -> None:
    model = random_model()
    # Per layer 16 x (4 x 8) for q and its like for o, 16 x (2 x 8) for k and v, and 3 of 16 x 24; two layers.
    # The MLP of the last layer sees labelled rows only.
    mlp = 3 * 16 * 24
    of_rows = 2 * (2 * 16 * 32 + 2 * 16 * 16) + mlp
    cost = TrainingCost.of(model)
    assert (cost.per_row, cost.per_label, cost.per_pair) == (6 * of_rows, 6 * (mlp + 16 * 24), 12 * 2 * 4 * 8)
    inputs = batches(config_of("refusion"), 2)[0]
    batch = inputs["batch"]
    num_rows, num_labels = len(batch.tokens_T), len(batch.ar.rows_R) + len(batch.mdm.rows_R)
    expected = num_rows * cost.per_row + num_labels * cost.per_label + inputs["num_pairs"] * cost.per_pair
    assert cost.flops(inputs) == expected
    model.requires_grad_(False)
    assert TrainingCost.of(model).per_row == 4 * of_rows
