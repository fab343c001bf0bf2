"""Closed forms of lengths are what many draws average to, and requests are summed up as steps see them."""

import numpy as np
import pytest

from meshwise.core.errors import MeshwiseError
from meshwise.jobs import ServingLoad
from meshwise.jobs.lengths import parse_lengths
from meshwise.jobs.mix import mix_lengths, mix_trace
from meshwise.jobs.traffic import read_trace

MANY = 400_000
DRAWN = ("300", "uniform:100-900", "uniform:7-8", "lognormal:800:0.6:4000", "lognormal:800:2:1000", "lognormal:5:1:64")


@pytest.mark.parametrize("text", [*DRAWN, "lognormal:50:0.5"])
def test_moments_and_quantiles_are_those_of_draws(text):
    lengths = parse_lengths(text)
    drawn = lengths.sample(np.random.default_rng(3), MANY).astype(float)
    assert lengths.mean == pytest.approx(drawn.mean(), rel=0.01)
    assert lengths.mean_square == pytest.approx((drawn**2).mean(), rel=0.02)
    assert lengths.least <= drawn.min()
    for share in (0.05, 0.52, 0.9, 0.99):
        assert lengths.quantile(share) == pytest.approx(np.quantile(drawn, share, method="inverted_cdf"), rel=0.02)
    assert lengths.quantile(1.0) == (lengths.most or lengths.quantile(1.0))


@pytest.mark.parametrize("prompt", DRAWN)
@pytest.mark.parametrize("output", ["64", "uniform:1-500", "lognormal:200:1:2000"])
def test_a_mix_is_what_steps_see(prompt, output):
    both = parse_lengths(prompt), parse_lengths(output)
    mix = mix_lengths(*both)
    if mix is None:
        assert (prompt, output) == ("300", "64")
        return
    random = np.random.default_rng(5)
    p, o = (x.sample(random, MANY).astype(float) for x in both)
    weights = o - 1
    context = np.average(p + o / 2, weights=weights)  # steps attend to p + 1 ... p + o - 1 tokens
    assert mix.mean_context == pytest.approx(context, rel=0.01)
    assert mix.mean_kept == pytest.approx(np.average(p + o, weights=weights), rel=0.01)
    chosen = random.choice(MANY, MANY, p=weights / weights.sum())
    assert mix.long_kept == pytest.approx(np.quantile((p + o)[chosen], 0.99), rel=0.05)
    assert mix.mean_prompt <= mix.mean_square_prompt**0.5 <= mix.longest


@pytest.mark.parametrize("requests", [4, 64, 1024])
def test_requests_together_rarely_need_more_than_is_kept_for_them(requests):
    both = parse_lengths("lognormal:800:0.8:6000"), parse_lengths("lognormal:200:0.8:2000")
    load = ServingLoad.of_mix(mix_lengths(*both))
    random = np.random.default_rng(11)
    p, o = (x.sample(random, MANY).astype(float) for x in both)
    chosen = random.choice(MANY, (4000, requests), p=(o - 1) / (o - 1).sum())
    needed = (p + o)[chosen].sum(axis=1)
    above = float((needed > requests * load.kept(requests)).mean())
    assert above < 0.02
    assert load.kept(requests) < load.longest
    assert load.kept(1) > load.kept(requests) > load.kept(4 * requests)


def test_a_trace_is_summed_up_with_prompts_and_outputs_that_belong_together(tmp_path):
    file = tmp_path / "requests.csv"
    file.write_text("arrival,prompt,output\n0,100,11\n1,900,1\n2,100,11\n3,300,31\n")
    mix = mix_trace(read_trace(file))
    assert (mix.mean_prompt, mix.mean_output, mix.shortest_prompt, mix.longest) == (350, 13.5, 100, 901)
    assert mix.mean_context == pytest.approx((20 * 105.5 + 30 * 315.5) / 50)
    assert mix.mean_kept == pytest.approx((20 * 111 + 30 * 331) / 50)
    assert mix.long_prompt == 900
    file.write_text("arrival,prompt,output\n0,100,11\n1,100,11\n")
    assert mix_trace(read_trace(file)) is None


def test_lengths_without_an_end_are_refused():
    with pytest.raises(MeshwiseError, match="write lognormal:100:1:927"):
        mix_lengths(parse_lengths("lognormal:100:1"), parse_lengths("8"))
    mix = mix_lengths(parse_lengths("uniform:100-200"), parse_lengths("8"))
    with pytest.raises(ValueError, match="expected fewer tokens than the shortest prompt's 100"):
        ServingLoad.of_mix(mix, cached_prefix=100)
