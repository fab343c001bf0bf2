"""Loads: their rates and lengths, that a seed decides them, and which traces are refused with which line."""

import itertools

import numpy as np
import pytest

from meshwise.core.errors import MeshwiseError
from meshwise.jobs.lengths import Lognormal, parse_lengths
from meshwise.jobs.traffic import Arrivals, DrawnLoad, SharedPrefixes, parse_arrivals, read_trace

MANY = 40_000


def times(arrivals, seed=1, count=MANY):
    return np.concatenate(list(arrivals.times(np.random.default_rng(seed), count)))


@pytest.mark.parametrize("text", ["poisson", "constant", "gamma:2.5", "gamma:0.5", "on-off:10s/30s"])
def test_arrivals_keep_their_rate_and_order(text):
    found = times(parse_arrivals(text, 20.0))
    assert len(found) == MANY
    assert (np.diff(found) >= 0).all()
    assert found[-1] / MANY * 20.0 == pytest.approx(1, rel=0.05)
    assert str(parse_arrivals(text, 20.0)) == text


@pytest.mark.parametrize(("text", "variation"), [("constant", 0), ("poisson", 1), ("gamma:2.5", 2.5)])
def test_gaps_vary_as_asked(text, variation):
    gaps = np.diff(times(parse_arrivals(text, 3.0)))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05, abs=1e-6)


def test_nothing_arrives_in_a_pause():
    found = times(parse_arrivals("on-off:10s/30s", 20.0))
    assert (found % 40.0 < 10.0 + 1e-9).all()


def test_another_rate_is_the_same_draw_stretched():
    slow, fast = times(parse_arrivals("gamma:2", 5.0)), times(parse_arrivals("gamma:2", 10.0))
    assert np.allclose(slow, 2 * fast)


def test_lengths_have_their_moments():
    random = np.random.default_rng(0)
    uniform = parse_lengths("uniform:100-300").sample(random, MANY)
    assert (uniform.min(), uniform.max()) == (100, 300)
    assert uniform.mean() == pytest.approx(200, rel=0.01)
    lognormal = parse_lengths("lognormal:1000:0.8").sample(random, MANY)
    assert lognormal.mean() == pytest.approx(1000, rel=0.03)
    assert lognormal.std() / lognormal.mean() == pytest.approx(0.8, rel=0.05)
    assert Lognormal(1000, 0.8, 1500).sample(random, MANY).max() == 1500
    assert set(parse_lengths(7).sample(random, 5)) == {7}


def test_a_seed_decides_all_and_the_rate_nothing_but_times():
    def load(seed, rate):
        prefixes = SharedPrefixes(64, groups=3)
        return DrawnLoad(
            Arrivals(rate), parse_lengths("uniform:1-99"), parse_lengths("lognormal:50:1"), 9000, seed, prefixes
        )

    def rest(demands):
        return [d[1:] for d in demands]

    one = list(load(1, 5.0).requests())
    assert len(one) == 9000
    assert one == list(load(1, 5.0).requests())
    assert rest(one) != rest(load(2, 5.0).requests())
    assert rest(one) == rest(load(1, 5.0).at_rate(9.0).requests())
    assert one[:100] == list(load(1, 5.0).first(100).requests())
    assert {d.prefix for d in one} == {((f"prefix {k}", 64),) for k in range(3)}
    assert min(d.prompt for d in one) == 65


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("uniform:9-3", "write uniform:3-9"),
        ("normal:5", "expected 1024, uniform:128-2048 or lognormal"),
        ("0", "expected more than zero"),
        ("1.5", "expected a whole number of tokens, found '1.5'"),
        ("lognormal:100:0.5:50", "a longest length above the mean"),
        ("lognormal:100:50", "at most 20"),
    ],
)
def test_lengths_that_cannot_be(text, words):
    with pytest.raises(MeshwiseError, match=words):
        parse_lengths(text, "--prompt")


@pytest.mark.parametrize(
    ("text", "rate", "words"),
    [
        ("burst", 1.0, "expected poisson, constant, gamma"),
        ("gamma", 1.0, "expected poisson, constant, gamma"),
        ("gamma:50", 1.0, "at most 20"),
        ("on-off:10s", 1.0, "expected poisson"),
        ("on-off:10/20", 1.0, "has no unit"),
        ("poisson", 0.0, "more than 0 requests per second"),
    ],
)
def test_arrivals_that_cannot_be(text, rate, words):
    with pytest.raises(MeshwiseError, match=words):
        parse_arrivals(text, rate)


TRACE = """arrival,prompt,output,prefix,keep_as
100.0,300,20,system:64/chat 1:100,chat 1b

100.5,200,1,,
102.0,10,5,system:8,
"""


@pytest.mark.parametrize(("rate", "count"), [(1e-300, 1), (1e-9, 2), (3e-5, 40_000)])
def test_loads_so_long_that_times_are_no_longer_exact_are_refused(tmp_path, rate, count):
    lengths = parse_lengths("8"), parse_lengths("2")
    for slower in (rate, 0.999 * count / 1e9):
        with pytest.raises(MeshwiseError, match=f"rate: {count:,} requests at .* for which times are exact"):
            DrawnLoad(Arrivals(slower), *lengths, num_requests=count)
    drawn = DrawnLoad(Arrivals(1.001 * count / 1e9), *lengths, num_requests=count)
    arrivals = [d.arrival for d in itertools.islice(drawn.requests(), 100)]
    assert all(np.spacing(arrival) < 1e-6 for arrival in arrivals)
    (tmp_path / "two.csv").write_text("arrival,prompt,output\n0,8,2\n1,8,2\n")
    with pytest.raises(MeshwiseError, match="rate: 2 requests"):
        read_trace(tmp_path / "two.csv").at_rate(1e-9)


def test_a_trace_is_read(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    trace = read_trace(file)
    first, second, third = trace.requests()
    assert first == (0.0, 300, 20, (("system", 64), ("chat 1", 100)), "chat 1b")
    assert second == (0.5, 200, 1, (), None)
    assert third.prefix == (("system", 8),)
    assert trace.rate == 1.0
    assert [d.arrival for d in trace.at_rate(2.0).requests()] == [0.0, 0.25, 1.0]
    assert trace.at_rate(2.0).rate == 2.0
    assert list(trace.first(2).requests()) == [first, second]


def test_a_trace_may_begin_with_the_mark_that_spreadsheets_write(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_bytes(b"\xef\xbb\xbfarrival,prompt,output\r\n1,300,20\r\n")
    assert [(d.prompt, d.output) for d in read_trace(file).demands] == [(300, 20)]


HEADER = "arrival,prompt,output\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: no column 'arrival'"),
        ("arrival,prompt\n", "line 1: no column 'output'; expected a header with arrival, prompt, output"),
        ("arrival,prompt,output,user\n", "line 1: unknown column 'user'; known: arrival"),
        ("arrival,prompt,output,output\n", "a column comes twice"),
        (HEADER, "expected requests below its header, found none"),
        (HEADER + "1,2,3\n2,3\n", r"line 3: expected 3 values \(arrival, prompt, output\), found 2: a torn line"),
        (HEADER + "1,2,3\n\n2,x,4\n", "line 4: prompt: expected a whole number of tokens, at least 1, found 'x'"),
        (HEADER + "1,2,0\n", "line 2: output: .* at least 1, found '0'"),
        (HEADER + "1,2.5,1\n", "line 2: prompt: .* found '2.5'"),
        (HEADER + "soon,2,1\n", "line 2: arrival: expected seconds, found 'soon'"),
        (HEADER + "nan,2,1\n", "line 2: arrival: expected seconds, found 'nan'"),
        (HEADER + "5,2,1\n4,2,1\n", "line 3: arrival: expected 5 or later, found 4; sort"),
        (HEADER + '5,"2,1\n', "line 2: unexpected end of data"),
        ("arrival,prompt,output,prefix\n1,5,5,a\n", "line 2: prefix: expected NAME:TOKENS"),
        ("arrival,prompt,output,prefix\n1,5,5,a:4/b:4\n", "line 2: prefix: its parts have 8 tokens, the prompt only 5"),
    ],
)
def test_a_trace_that_cannot_be_says_where(tmp_path, text, words):
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(MeshwiseError, match=words):
        read_trace(file)


def test_no_trace(tmp_path):
    with pytest.raises(MeshwiseError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MeshwiseError, match="expected CSV in UTF-8"):
        read_trace(tmp_path / "binary.csv")
    (tmp_path / "once.csv").write_text(HEADER + "5,2,1\n5,2,1\n")
    with pytest.raises(MeshwiseError, match="all requests arrive at once"):
        read_trace(tmp_path / "once.csv").at_rate(2.0)


def test_a_million_requests_come_in_blocks():
    load = DrawnLoad(Arrivals(100.0), parse_lengths("64"), parse_lengths("8"), 10**9)
    assert len(list(itertools.islice(load.requests(), 10_000))) == 10_000
