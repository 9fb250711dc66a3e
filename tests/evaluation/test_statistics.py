"""The statistics of a counterfactual."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch
from sklearn.metrics import roc_auc_score

from wherefrom import WherefromError
from wherefrom.evaluation import (
    Estimate,
    auc,
    auc_interval,
    budget,
    estimate,
    expected_random_union,
    paired_test,
    per_seed_auc,
    per_seed_ratio,
    pooled_auc,
    random_auc,
    random_ratio,
    ratio_interval,
    removal_union,
    similarity_ratio,
    stray,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def runs(seeds: int, queries: int, controls: int, shift: float = 0.0, seed: int = 0):
    """A method whose similarities lie `shift` below those of its random controls."""
    draws = normal(seeds, controls + 1, queries, seed=seed)
    return {s: draws[s, 0] - shift for s in range(seeds)}, {s: draws[s, 1:] for s in range(seeds)}


# --- AUC ------------------------------------------------------------------------------------------


def test_auc_is_one_when_all_the_methods_similarities_are_lower():
    assert auc([0.1, 0.2], [0.3, 0.4, 0.5]) == 1
    assert auc([0.3, 0.4, 0.5], [0.1, 0.2]) == 0


def test_auc_of_like_sets_is_a_half():
    values = normal(20)
    assert auc(values, values) == 0.5
    assert auc([0.7] * 3, [0.7] * 5) == 0.5


@pytest.mark.parametrize("levels", [3, 10, 10_000])
def test_auc_is_that_of_scikit_learn_also_with_ties(levels):
    draws = torch.randint(levels, (60,), generator=torch.Generator().manual_seed(levels)) / levels
    method, random = draws[:20] - 0.1 * (levels > 3), draws[20:]
    labels = [0] * 20 + [1] * 40
    assert auc(method, random) == pytest.approx(
        roc_auc_score(labels, torch.cat([method, random]).numpy()), abs=1e-12
    )


def test_auc_takes_plain_numbers_and_low_precision():
    assert auc((1, 2), torch.tensor([3, 4], dtype=torch.bfloat16)) == 1


@pytest.mark.parametrize("bad", [[], [0.1, math.nan], [math.inf], [[0.1]]])
@pytest.mark.parametrize("statistic", [auc, similarity_ratio])
def test_similarities_that_cannot_be_compared_are_refused(statistic, bad):
    with pytest.raises(WherefromError, match="the method's similarities"):
        statistic(bad, [0.5])
    with pytest.raises(WherefromError, match="the random similarities"):
        statistic([0.5], bad)


# --- ratio ----------------------------------------------------------------------------------------


def test_ratio_is_the_mean_relative_to_the_median_in_percent():
    assert similarity_ratio([0.4, 0.5], [0.1, 0.5, 0.9]) == pytest.approx(-10)


def test_the_median_of_an_even_count_is_the_mean_of_the_middle_two():
    assert similarity_ratio([0.3], [0.0, 0.2, 0.4, 9.0]) == pytest.approx(0)


def test_a_median_near_zero_or_below_counts_as_a_hundredth():
    assert similarity_ratio([0.02], [-0.5, 0.001, 0.002]) == pytest.approx(100)
    assert similarity_ratio([0.02], [-0.5]) == pytest.approx(100)


# --- removal --------------------------------------------------------------------------------------


def test_a_budget_is_the_nearest_whole_number_and_at_least_one():
    assert [
        budget(50_000, 0.02),
        budget(118_287, 0.02),
        budget(100, 0.29),
        budget(10, 0.001),
        budget(7, 1.0),
    ] == [
        1000,
        2366,
        29,
        1,
        7,
    ]


def test_the_union_holds_each_querys_top_once_and_sorted():
    scores = torch.tensor([[0.0, 5.0, 4.0, 1.0, 2.0], [9.0, 8.0, 0.0, 0.0, 0.0]])
    assert removal_union(scores, 0.4).tolist() == [0, 1, 2]
    assert removal_union(scores, 0.4).dtype == torch.int64
    assert removal_union(scores, 1).tolist() == [0, 1, 2, 3, 4]


def test_equal_scores_go_to_the_smaller_index():
    assert removal_union(torch.zeros(2, 10), 0.3).tolist() == [0, 1, 2]
    assert removal_union(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]]), 0.6).tolist() == [0, 1, 3]


def test_an_item_that_must_not_be_removed_may_score_minus_infinity():
    assert removal_union(torch.tensor([[-math.inf, 1.0, 0.0]]), 0.34).tolist() == [1]


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, math.nan])
def test_a_fraction_outside_of_zero_to_one_is_refused(fraction):
    with pytest.raises(WherefromError, match="fraction to remove must be above 0 and at most 1"):
        removal_union(torch.zeros(1, 4), fraction)


def test_scores_that_cannot_be_ranked_are_refused():
    with pytest.raises(WherefromError, match="scores hold NaN"):
        removal_union(torch.tensor([[0.0, math.nan]]), 0.5)
    for shape in ((4,), (0, 4), (4, 0)):
        with pytest.raises(WherefromError, match="scores are \\[queries, training items\\]"):
            removal_union(torch.zeros(shape), 0.5)


def test_the_expected_union_has_the_papers_figures():
    assert round(expected_random_union(50_000, 1000, 20)) == 16_620
    assert round(expected_random_union(118_287, 2366, 20)) == 39_321


def test_the_expected_union_is_what_random_scores_give():
    generator = torch.Generator().manual_seed(0)
    sizes = [len(removal_union(torch.rand(20, 500, generator=generator), 0.02)) for _ in range(200)]
    wanted = expected_random_union(500, 10, 20)
    assert abs(sum(sizes) / 200 - wanted) < 4 * torch.tensor(sizes).double().std() / math.sqrt(200)


def test_random_sets_larger_than_the_whole_are_refused():
    with pytest.raises(WherefromError, match="3 random sets of 6 cannot be drawn from 5 items"):
        expected_random_union(5, 6, 3)


# --- seeds ----------------------------------------------------------------------------------------


def test_an_estimate_is_mean_and_standard_error_over_seeds():
    assert astuple(estimate([0.8, 0.9, 1.0])) == pytest.approx((0.9, 0.1 / math.sqrt(3), 3))
    assert estimate({7: 0.25, 9: 0.25}.values()) == Estimate(0.25, 0, 2)


def test_the_error_of_one_seed_is_not_a_number():
    assert math.isnan(estimate([0.5]).error)


def test_a_seed_is_compared_with_its_own_controls_only():
    method = {1: torch.tensor([0.1, 0.2]), 2: torch.tensor([0.8, 0.9])}
    controls = {
        2: torch.tensor([[0.1, 0.2], [0.3, 0.95]]),
        1: torch.tensor([[0.3, 0.4], [0.5, 0.6]]),
    }
    assert per_seed_auc(method, controls) == {1: 1.0, 2: 0.25}
    assert per_seed_ratio(method, controls) == pytest.approx(
        {1: 100 * (0.15 / 0.45 - 1), 2: 100 * (0.85 / 0.25 - 1)}
    )


def test_the_pooled_auc_puts_all_seeds_together():
    method, controls = runs(3, 10, 2, shift=0.5)
    together = auc(torch.cat(list(method.values())), torch.cat(list(controls.values())).flatten())
    assert pooled_auc(method, controls) == together


def test_a_control_is_compared_with_the_others_of_its_seed():
    controls = {5: torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])}
    assert random_auc(controls)[5].tolist() == [1, 0.5, 0]
    assert astuple(stray(controls)) == pytest.approx((math.sqrt(1 / 6), math.sqrt(1 / 6), 0, 1, 3))


def test_a_control_has_a_ratio_to_the_others_of_its_seed():
    controls = {5: torch.tensor([[0.1, 0.3], [0.4, 0.4], [0.5, 0.7]])}
    wanted = [100 * (0.2 / 0.45 - 1), 100 * (0.4 / 0.4 - 1), 100 * (0.6 / 0.35 - 1)]
    assert random_ratio(controls)[5].tolist() == pytest.approx(wanted)


def test_the_stray_is_that_of_a_fresh_control():
    """Controls whose levels differ: the deviation seen within seeds is the one between a control
    and new ones.
    """
    count, levels = 3, 0.3
    seeds = {
        s: levels * normal(count, 1, seed=s) + normal(count, 30, seed=1000 + s) for s in range(400)
    }
    fresh = [
        auc(
            (levels * normal(1, 1, seed=2000 + s) + normal(1, 30, seed=3000 + s)).flatten(),
            (
                levels * normal(count - 1, 1, seed=4000 + s) + normal(count - 1, 30, seed=5000 + s)
            ).flatten(),
        )
        for s in range(400)
    ]
    apart = torch.tensor(fresh) - 0.5
    assert stray(seeds).deviation == pytest.approx(float(apart.square().mean().sqrt()), rel=0.1)
    means_of_four = apart.unflatten(0, (100, 4)).mean(1)
    errors = torch.tensor(
        [stray({s: seeds[s] for s in range(start, start + 4)}).error for start in range(0, 400, 4)]
    )
    assert float(errors.square().mean().sqrt()) == pytest.approx(
        float(means_of_four.square().mean().sqrt()), rel=0.2
    )


def test_the_stray_of_several_metrics_is_that_of_their_mean():
    controls = {5: torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])}
    upside_down = {5: 1 - controls[5]}
    assert stray(controls, controls) == stray(controls)
    assert stray(controls, upside_down).deviation == 0


def test_stray_needs_two_controls():
    with pytest.raises(WherefromError, match="seed 3 has random similarities of shape \\(1, 4\\)"):
        stray({3: torch.zeros(1, 4)})
    with pytest.raises(WherefromError, match="no random controls"):
        stray({})


@pytest.mark.parametrize(
    "statistic", [per_seed_auc, per_seed_ratio, pooled_auc, auc_interval, ratio_interval]
)
def test_seeds_and_queries_that_do_not_match_are_refused(statistic):
    with pytest.raises(
        WherefromError, match="same seeds, at least one, not \\[1\\] and \\[1, 2\\]"
    ):
        statistic({1: torch.ones(3)}, {1: torch.ones(2, 3), 2: torch.ones(2, 3)})
    with pytest.raises(WherefromError, match="same seeds"):
        statistic({}, {})
    with pytest.raises(
        WherefromError,
        match="controls of seed 1 are \\[controls, 3 queries\\], not of shape \\(2, 4\\)",
    ):
        statistic({1: torch.ones(3)}, {1: torch.ones(2, 4)})
    with pytest.raises(
        WherefromError, match="random similarities of seed 1 hold a value that is not a number"
    ):
        statistic({1: torch.ones(1)}, {1: torch.tensor([[math.nan]])})


# --- intervals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [auc_interval, ratio_interval])
def test_an_interval_is_the_same_every_time_and_another_for_another_seed(interval):
    method, controls = runs(3, 8, 2)
    first = interval(method, controls, resamples=200)
    assert first == interval(method, controls, resamples=200)
    assert first != interval(method, controls, resamples=200, seed=1)


def test_a_method_always_below_random_has_an_interval_of_one():
    method, controls = runs(2, 10, 3, shift=100)
    assert astuple(auc_interval(method, controls, resamples=50)) == (1, 1)


def test_a_resample_has_the_auc_and_the_ratio_of_the_drawn_queries():
    from wherefrom.evaluation.statistics import _resampled_auc, _resampled_ratio

    method, controls = (
        normal(7).mul(4).round() / 4 + 2,
        normal(3, 7, seed=1).mul(4).round() / 4 + 2,
    )  # with ties
    queries = torch.randint(7, (5, 7), generator=torch.Generator().manual_seed(2))
    for row, area, ratio in zip(
        queries,
        _resampled_auc(method, controls, queries),
        _resampled_ratio(method, controls, queries),
        strict=True,
    ):
        assert float(area) == pytest.approx(auc(method[row], controls[:, row].flatten()))
        assert float(ratio) == pytest.approx(
            similarity_ratio(method[row], controls[:, row].flatten())
        )


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    truth = 0.5 * (1 + math.erf(0.5 / 2))  # P(N(0, 1) > N(-.5, 1))
    held = 0
    for trial in range(100):
        found = auc_interval(*runs(6, 20, 3, shift=0.5, seed=trial), resamples=200)
        held += found.low <= truth <= found.high
    assert 85 <= held <= 100


def test_more_queries_narrow_the_interval():
    few, many = (ratio_interval(*runs(4, count, 2), resamples=200) for count in (10, 160))
    # of values about 0 the floored median makes a ratio wide, but no less an average
    assert many.high - many.low < 0.5 * (few.high - few.low)


@pytest.mark.parametrize("call", [auc_interval, ratio_interval])
def test_no_resamples_are_refused(call):
    with pytest.raises(WherefromError, match="at least one resample, not 0"):
        call(*runs(1, 3, 2), resamples=0)


# --- two methods ----------------------------------------------------------------------------------


def test_the_paired_test_by_hand():
    """Differences -1, -2, -3: of 8 sign patterns only all minus and all plus reach |sum| = 6."""
    found = paired_test({1: torch.tensor([1.0, 1.0, 1.0])}, {1: torch.tensor([2.0, 3.0, 4.0])})
    assert astuple(found) == (-2, 2 / 8, 3)


def test_the_paired_test_over_seeds_by_hand():
    """Differences 1, 3 and -2: |sum| = 2 or more in six of the eight, all but those of 1 + 2 - 3
    and its mirror.
    """
    one = {1: torch.tensor([1.0, 3.0]), 2: torch.tensor([0.0])}
    found = paired_test(one, {2: torch.tensor([2.0]), 1: torch.tensor([0.0, 0.0])})
    assert astuple(found) == pytest.approx((2 / 3, 6 / 8, 3))


def test_methods_that_do_not_differ_have_a_p_value_of_one():
    same = {1: normal(5), 2: normal(40, seed=1)}
    assert paired_test(same, same).p_value == 1


def test_the_order_of_methods_turns_the_difference_not_the_p_value():
    one, other = {1: normal(12)}, {1: normal(12, seed=1) + 0.4}
    there, back = paired_test(one, other), paired_test(other, one)
    assert there.p_value == back.p_value
    assert there.difference == -back.difference < 0


def test_random_sign_patterns_agree_with_all_of_them(monkeypatch):
    one, other = {1: normal(14)}, {1: normal(14, seed=1) + 0.6}
    exact = paired_test(one, other).p_value
    monkeypatch.setattr("wherefrom.evaluation.statistics._EXACT", 0)
    drawn = paired_test(one, other)
    assert drawn.p_value == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 10_000))
    assert drawn == paired_test(one, other)
    assert drawn != paired_test(one, other, seed=1)


def test_a_clear_difference_is_found_and_never_with_p_zero():
    found = paired_test({1: normal(100)}, {1: normal(100) + 1}, resamples=1500)
    assert found.p_value == pytest.approx(1 / 1501)


def test_under_no_difference_the_p_value_is_small_as_rarely_as_it_says():
    small = sum(
        paired_test({1: normal(8, seed=2 * t)}, {1: normal(8, seed=2 * t + 1)}).p_value <= 0.1
        for t in range(300)
    )
    assert 0.05 * 300 <= small <= 0.15 * 300


def test_methods_on_other_seeds_or_queries_are_not_paired():
    with pytest.raises(
        WherefromError,
        match="the two methods need the same seeds, at least one, not \\[1\\] and \\[2\\]",
    ):
        paired_test({1: torch.ones(2)}, {2: torch.ones(2)})
    with pytest.raises(
        WherefromError, match="seed 1 has 2 queries for one method and 3 for the other"
    ):
        paired_test({1: torch.ones(2)}, {1: torch.ones(3)})
    with pytest.raises(WherefromError, match="at least one resample"):
        paired_test({1: torch.ones(2)}, {1: torch.ones(2)}, resamples=0)
