"""An unknown setting: the sentence names the one that was probably meant."""

import pytest

from training.config.train_config import TrainConfig
from training.errors import BadInput


@pytest.mark.parametrize(
    "values, said",
    [
        ({"data": {"repeat": 3}}, "data.repeat: there is no such setting (got 3); perhaps data.repeats is meant."),
        ({"optimizer": {"lerning_rate": 1}}, "perhaps optimizer.learning_rate is meant."),
        ({"repeats": 3}, "repeats: there is no such setting (got 3); perhaps data.repeats is meant."),
        ({"optimizer": {"repeats": 3}}, "optimizer.repeats: there is no such setting (got 3); perhaps data.repeats is"),
        ({"optimiser": {"betas": [0, 0]}}, "optimiser: there is no such setting; perhaps optimizer is meant."),
        ({"epoch": 3}, "epoch: there is no such setting (got 3); perhaps epochs is meant."),
        ({"lora": {"rnak": 4}}, "lora.rnak: there is no such setting (got 4); perhaps lora.rank is meant."),
        ({"data": {"zzz": 3}}, "data.zzz: there is no such setting (got 3)."),
    ],
)
def test_the_nearest_setting_is_named(values, said):
    with pytest.raises(BadInput) as caught:
        TrainConfig.build({"dataset": "d", "run": "r", **values})
    assert str(caught.value).startswith("Training configuration: ") and said in str(caught.value)


def test_what_is_known_but_wrong_is_told_as_ever():
    with pytest.raises(BadInput, match=r"epochs: Input should be greater than or equal to 1 \(got 0\)\.$"):
        TrainConfig.build({"dataset": "d", "run": "r", "epochs": 0})
