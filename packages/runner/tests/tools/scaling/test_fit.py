"""Fits of scaling laws: published coefficients, exact laws, and coverage of the intervals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.scaling.command import choose_law
from layerkit_runner.tools.scaling.fit import LEVEL, fit_law
from layerkit_runner.tools.scaling.ladder import Size

E, POWER_N, POWER_D, POWER_C = 0.9, 0.34, 0.37, 0.15


def ladder(*, ratios: tuple[float, ...], num: int) -> list[Size]:
    """Return rungs of 1e12 to 1e14 FLOPs, C = 6·N·D, with each of the tokens per weight."""
    budgets = np.repeat(np.geomspace(1e12, 1e14, num), len(ratios))
    weights = np.sqrt(budgets / 6 / np.tile(ratios, num))
    return [Size(n, c / 6 / n, c) for n, c in zip(weights, budgets, strict=True)]


def loss_of(size: Size, *, is_ray: bool) -> float:
    if is_ray:
        return E + 1.6 * (size.C / 1e12) ** -POWER_C
    return E + 0.5 * (size.N / 1e5) ** -POWER_N + 0.5 * (size.D / 2e6) ** -POWER_D


def test_fit_equals_published_coefficients_of_chinchilla():
    # Besiroglu et al., 2024, arXiv:2404.10102, table 1: the estimates, and their standard errors.
    weights, flops, losses = np.loadtxt(Path(__file__).with_name("chinchilla.csv"), delimiter=",").T
    law = fit_law({"N": weights, "D": flops / 6 / weights}, losses, num_draws=50)
    published = {
        "E": (1.8172, 0.03),
        "exponent of N": (0.3478, 0.02),
        "exponent of D": (0.3658, 0.02),
    }
    for name, (value, error) in published.items():
        fitted, low, high = law.parameters()[name]  # type: ignore[misc]
        assert fitted == pytest.approx(value, abs=0.1 * error)
        assert low < value < high
        assert high - low < 2 * 1.96 * 1.5 * error


@pytest.mark.parametrize("is_ray", [True, False])
def test_fit_recovers_an_exact_law(is_ray):
    sizes = ladder(ratios=(20,) if is_ray else (5, 20, 80), num=5)
    law = choose_law(sizes, [loss_of(size, is_ray=is_ray) for size in sizes])
    known = law.parameters()
    exponents = {"C": POWER_C} if is_ray else {"N": POWER_N, "D": POWER_D}
    assert known["E"][0] == pytest.approx(E, rel=1e-3)  # type: ignore[index]
    for name, power in exponents.items():
        assert known[f"exponent of {name}"][0] == pytest.approx(power, rel=1e-2)  # type: ignore[index]
    larger = ladder(ratios=(20,), num=1)[0]._replace(C=3e14, N=1.6e6, D=3.2e7)
    assert law.predict(larger._asdict())[0] == pytest.approx(
        loss_of(larger, is_ray=is_ray), rel=1e-4
    )


def test_three_rungs_identify_no_floor():
    sizes = ladder(ratios=(20,), num=3)
    law = choose_law(sizes, [2.0 * (size.C / 1e12) ** -0.1 for size in sizes])
    assert "E" not in law.parameters()
    assert law.text() == "L(C) = 31.698/C^0.1"  # 2·(1e12)^0.1
    assert law.predict({"C": 1e15})[0] == pytest.approx(2 * 1000**-0.1)


@pytest.mark.parametrize("num", [3, 5])
def test_seeds_of_a_rung_count_as_one(num):
    sizes = ladder(ratios=(20,), num=num)
    losses = np.array([loss_of(size, is_ray=True) for size in sizes])
    law = choose_law(sizes, losses)
    spread = 1.02 ** np.array([-1, 0, 1])
    # Two more seeds of the smallest rung.
    seeds = choose_law([sizes[0]] * 2 + sizes, [*losses[0] * spread[::2], *losses])
    assert seeds.text() == law.text()
    assert ("E" in seeds.parameters()) == (num == 5)
    value, low, high = seeds.predict({"C": 3e14})
    # The measured loss is that of one seed: 1.96 standard deviations of 0.02 to both sides.
    assert high / low > 1.02 ** (2 * 1.8)
    assert value == pytest.approx(law.predict({"C": 3e14})[0])


def test_floor_of_noisy_losses_on_a_line_is_not_identified():
    sizes = ladder(ratios=(20,), num=5)
    noise = 0.01 * np.array([1, -1, 0.5, -1, 1])
    flops = np.array([size.C for size in sizes])
    law = fit_law({"C": flops}, 2 * (flops / 1e12) ** -0.1 * (1 + noise), num_draws=50)
    assert law.parameters()["E"] is None


@pytest.mark.parametrize(
    ("ratios", "num", "expected"),
    [
        ((20.0,), 2, "at least 3 finished"),
        ((5.0, 80.0), 2, r"at least 6, for L\(N, D\), since D/N is 5 to 80"),
    ],
)
def test_too_few_rungs_are_an_error(ratios, num, expected):
    sizes = ladder(ratios=ratios, num=num)
    with pytest.raises(UsageError, match=expected):
        choose_law(sizes, [1.0] * len(sizes))


@pytest.mark.parametrize("name", ["N", "D"])
def test_rungs_of_one_size_or_number_of_tokens_are_an_error(raises, name):
    values = np.geomspace(1e6, 1e8, 6)
    sizes = [Size(1e6, d, 6e6 * d) if name == "N" else Size(d, 1e6, 6e6 * d) for d in values]
    with raises(UsageError, owner="rungs", field=name, value="1e+06 to 1e+06"):
        choose_law(sizes, [loss_of(size, is_ray=False) for size in sizes])


@pytest.mark.slow  # intervals of the published losses are above
@pytest.mark.parametrize("num_cases", [200, 8], ids=str)
@pytest.mark.parametrize("is_ray", [True, False])
def test_intervals_cover_the_truth_at_their_level(is_ray, num_cases):
    random = np.random.default_rng(0)
    sizes = ladder(ratios=(20,) if is_ray else (5, 20, 80), num=5)
    columns = dict(zip(Size._fields, np.array(sizes).T, strict=True))
    chosen = {name: columns[name] for name in ("C" if is_ray else "ND")}
    exact = np.array([loss_of(size, is_ray=is_ray) for size in sizes])
    larger = Size(1.6e6, 3.2e7, 3e14)
    covered = []
    for case in range(num_cases):
        noise = np.exp(0.002 * random.standard_normal(len(sizes) + 1))
        law = fit_law(chosen, exact * noise[1:], num_draws=100, seed=case)
        _, low, high = law.predict(larger._asdict())
        truth = {"E": E} | ({"exponent of C": POWER_C} if is_ray else {"exponent of N": POWER_N})
        inside = [low < loss_of(larger, is_ray=is_ray) * noise[0] < high]
        for name, value in truth.items():
            if known := law.parameters()[name]:
                inside.append(known[1] < value < known[2])
        covered.append(inside)
    rate = np.mean([inside[0] for inside in covered])
    others = np.mean([one for inside in covered for one in inside[1:]])
    # Three standard deviations of the share of that many cases.
    margin = 3 * np.sqrt(LEVEL * (1 - LEVEL) / num_cases) + 0.01
    assert rate > LEVEL - margin
    assert others > LEVEL - margin
