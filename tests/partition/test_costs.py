"""Profiles: what they hold, how they are saved, and what stages of them cost."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from partition import LayerCost, Partition, PartitionError, Profile, ProfileError, predict_timeline, stage_costs
from schedules import Action, Costs, Schedule, build, simulate

SECONDS = st.floats(0, 1e6)
BYTES = st.integers(0, 2**62)
LAYERS = st.builds(
    LayerCost,
    name=st.text(max_size=5),
    type=st.text(max_size=5),
    forward=SECONDS,
    input_grad=SECONDS,
    weight_grad=SECONDS,
    activation_bytes=BYTES,
    parameters=BYTES,
)
PROFILES = st.builds(
    Profile, layers=st.lists(LAYERS, min_size=1, max_size=4).map(tuple), hop=SECONDS, device=st.text(max_size=5)
)


@settings(max_examples=40)
@given(PROFILES)
def test_a_saved_profile_is_the_same_to_the_last_bit(profile):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        profile.save(path)
        assert Profile.load(path) == profile
        assert Profile.load(path).digest() == profile.digest()
        assert os.listdir(folder) == ["profile.json"]


def test_saving_replaces_the_whole_file_or_nothing(make_profile, tmp_path):
    path = tmp_path / "profile.json"
    make_profile([1.0, 2.0]).save(path)
    make_profile([3.0]).save(path)
    assert [layer.forward for layer in Profile.load(path).layers] == [3.0]
    with pytest.raises(FileNotFoundError):
        make_profile([3.0]).save(tmp_path / "nowhere" / "profile.json")
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_the_digest_tells_profiles_apart(make_profile):
    one = make_profile([1.0, 2.0])
    assert one.digest() == make_profile([1.0, 2.0]).digest()
    assert len({one.digest(), make_profile([2.0, 1.0]).digest(), make_profile([1.0, 2.0], hop=0.1).digest()}) == 3


def test_what_cannot_be_is_refused(make_profile):
    layer = {"name": "a", "type": "A", "forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0}
    for wrong in ({"forward": -1.0}, {"forward": float("nan")}, {"parameters": -1}, {"color": 1}):
        with pytest.raises(ValidationError):
            LayerCost(**{**layer, **wrong})
    with pytest.raises(ValidationError):
        Profile(layers=())
    with pytest.raises(ValidationError):
        make_profile([1.0]).hop = 2.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "damaged or not a profile"),
        ('{"format": "pipeloom profile 1", "layers": [{"na', "damaged or not a profile"),
        ("[1, 2]", "is not a profile"),
        ('{"traceEvents": []}', 'does not say "format": "pipeloom profile 1"'),
        ('{"format": "pipeloom profile 1", "layers": []}', "damaged: layers: "),
        ('{"format": "pipeloom profile 1", "layers": [{"name": "a"}]}', r"damaged: layers\.0\.type: "),
        ("\udcff", "damaged or not a profile"),
    ],
)
def test_other_files_are_refused_with_a_remedy(text, words, tmp_path):
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ProfileError, match=rf"profile\.json.*{words}.*Profile\.save"):
        Profile.load(path)


def test_a_missing_file_and_a_damaged_number(make_profile, tmp_path):
    with pytest.raises(ProfileError, match="cannot read the profile"):
        Profile.load(tmp_path / "none.json")
    path = tmp_path / "profile.json"
    make_profile([1.0, 2.0]).save(path)
    found = json.loads(path.read_text())
    found["layers"][1]["forward"] = -2.0
    path.write_text(json.dumps(found))
    with pytest.raises(ProfileError, match=r"layers\.1\.forward: .*greater than or equal to 0"):
        Profile.load(path)


def test_stage_costs_are_sums_over_the_layers_of_a_stage():
    layers = tuple(
        LayerCost(name=str(i), type="T", forward=i, input_grad=10 * i, weight_grad=100 * i) for i in range(1, 6)
    )
    schedule = build("1f1b", ranks=3, micro_batches=4)
    costs = stage_costs(Profile(layers=layers, hop=0.5), Partition((0, 2, 2, 5)), schedule)
    # The middle stage is empty.
    assert costs == Costs(F=(3.0, 0.0, 12.0), I=(30.0, 0.0, 120.0), W=(300.0, 0.0, 1200.0), hop=0.5)


def two_copies():
    """Two ranks, each with both halves of the model: stages 0, 1 run down, their copies 2, 3 run up."""
    rows = [["0F0", "3F1", "3B1", "0B0"], ["2F1", "1F0", "1B0", "2B1"]]
    return Schedule.from_rows(
        "two-copies",
        [[Action.parse(text) for text in row] for row in rows],
        (0, 1, 1, 0),
        routes=((0, 1), (2, 3)),
        layer_group_of_stage=(0, 1, 0, 1),
    )


def test_copies_of_a_stage_cost_the_same(make_profile):
    profile, schedule = make_profile([1.0, 2.0, 4.0]), two_copies()
    assert stage_costs(profile, Partition((0, 1, 3)), schedule).F == (1.0, 6.0, 1.0, 6.0)


def test_the_predicted_timeline_is_the_simulated_one(make_profile):
    profile, schedule = make_profile([1.0, 1.0, 2.0], hop=0.25), build("gpipe", ranks=2, micro_batches=3)
    timeline = predict_timeline(profile, Partition((0, 2, 3)), schedule)
    # GPipe with equal stages: (m + p - 1) (F + I + W) and a hop each way.
    assert timeline.step_time == (3 + 1) * 6 + 2 * 0.25
    assert timeline.step_time == simulate(schedule, Costs(F=2, I=2, W=2, hop=0.25)).step_time
    assert timeline.kind == "predicted"


def test_what_does_not_belong_together_is_refused(make_profile):
    schedule = build("1f1b", ranks=2, micro_batches=4)
    with pytest.raises(ProfileError, match="the profile has 3 layers, the model 4"):
        stage_costs(make_profile([1.0] * 3), Partition((0, 2, 4)), schedule)
    with pytest.raises(PartitionError, match="the partition has 3 parts, schedule '1f1b' needs 2"):
        stage_costs(make_profile([1.0] * 3), Partition((0, 1, 2, 3)), schedule)


def test_profiles_from_before_ranks_had_speeds_are_loaded(make_profile, tmp_path):
    path = tmp_path / "profile.json"
    slow = make_profile([1.0, 2.0]).model_copy(update={"speeds": (1.0, 0.5)})
    slow.save(path)
    assert Profile.load(path) == slow
    found = json.loads(path.read_text())
    del found["speeds"]
    path.write_text(json.dumps(found))
    assert Profile.load(path) == make_profile([1.0, 2.0])
    path.write_text(json.dumps({**found, "speeds": [1.0, 0.0]}))
    with pytest.raises(ProfileError, match=r"speeds\.1: .*greater than 0"):
        Profile.load(path)


def test_a_slow_rank_takes_longer_in_what_is_simulated() -> None:
    layers = tuple(LayerCost(name=str(i), type="L", forward=1.0, input_grad=1.0, weight_grad=1.0) for i in range(2))
    schedule = build("gpipe", ranks=2, micro_batches=3)
    even = Profile(layers=layers)
    slow = even.model_copy(update={"speeds": (1.0, 0.5)})
    assert predict_timeline(even, Partition((0, 1, 2)), schedule).step_time == 3 * 3 + 3
    # The second rank's nine passes take twice as long; beside them a forward and a backward of the first.
    assert predict_timeline(slow, Partition((0, 1, 2)), schedule).step_time == 1 + 2 * 9 + 2
    other = even.model_copy(update={"speeds": (1.0, 0.5, 1.0)})  # measured on another number of ranks
    assert predict_timeline(other, Partition((0, 1, 2)), schedule).step_time == 12
