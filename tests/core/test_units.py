"""The two doors between text with units and floats: what format prints, parse reads back; every error's words."""
# ruff: noqa: E501 - one case a line

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.core import units
from meshwise.core.errors import UnitError
from meshwise.core.units import (
    Quantity,
    format_bandwidth,
    format_bytes,
    format_count,
    format_duration,
    format_flops,
    format_flops_per_s,
    format_money,
    format_percent,
    format_time,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_flops_per_s,
    parse_fraction,
    parse_money,
)
from tests.each import each

#: Three significant digits are printed, so reading back is off by at most half of the third digit.
ROUNDING = 0.5e-2


@pytest.mark.parametrize(
    ("show", "read", "low", "high"),
    [
        (format_bytes, parse_bytes, 1.0, 2.0**49),
        (format_bandwidth, parse_bandwidth, 1.0, 1e15),
        (format_count, parse_count, 1.0, 9e14),
        (format_flops_per_s, parse_flops_per_s, 1.0, 9e20),
        (format_time, parse_duration, 1e-9, 1e6),
        (format_duration, parse_duration, 1e-9, 1e9),
        (format_money, parse_money, 1.0, 1e12),
        (format_percent, parse_fraction, 0.2, 1.0),
    ],
)
def test_what_is_shown_is_read_back_within_its_rounding(show, read, low, high):
    @given(st.floats(math.log(low), math.log(high)))
    def check(logarithm: float) -> None:
        value = min(max(math.exp(logarithm), low), high)
        assert read(show(value)) == pytest.approx(value, rel=ROUNDING)

    check()


@given(st.integers(1, 10**15))
def test_whole_counts_are_read_exactly(number):
    assert parse_count(str(number)) == number
    assert parse_count(f"{number:,}") == number
    assert parse_count(f"{number:_}") == number
    assert parse_count(number) == number


@given(st.floats(1e-300, 1e300), st.sampled_from(["GB", "GiB", "kB", "B", "TB"]))
def test_sizes_scale_with_their_unit(number, unit):
    factor = {"GB": 1e9, "GiB": 2.0**30, "kB": 1e3, "B": 1.0, "TB": 1e12}[unit]
    if math.isfinite(number * factor):
        assert parse_bytes(f"{number!r} {unit}") == number * factor
    else:
        with pytest.raises(UnitError, match="too large to be meant"):
            parse_bytes(f"{number!r} {unit}")


@each(
    "read, text, value",
    [
        (parse_count, "4Mi", 4194304),
        (parse_count, "4M", 4e6),
        (parse_count, "15T", 15e12),
        (parse_count, "8B", 8e9),
        (parse_count, " 1_024 ", 1024),
        (parse_count, "1.5e3", 1500),
        (parse_bytes, "80GB", 80e9),
        (parse_bytes, "80 GiB", 80 * 2**30),
        (parse_bytes, "512 bytes", 512),
        (parse_bandwidth, "450GB/s", 450e9),
        (parse_bandwidth, "450GBps", 450e9),
        (parse_bandwidth, "400Gbit/s", 50e9),
        (parse_bandwidth, "400Gbps", 50e9),
        (parse_bandwidth, "1GiB/s", 2**30),
        (parse_flops_per_s, "989TFLOP/s", 989e12),
        (parse_flops_per_s, "989 TFLOPS", 989e12),
        (parse_flops_per_s, "1.97e14FLOP/s", 1.97e14),
        (parse_flops_per_s, "394TOPS", 394e12),
        (parse_duration, "30d", 2592000),
        (parse_duration, "2h", 7200),
        (parse_duration, "1us", 1e-6),
        (parse_duration, "1 µs", 1e-6),
        (parse_money, "5M$", 5e6),
        (parse_money, "$4.20", 4.2),
        (parse_money, "300k USD", 300e3),
        (parse_fraction, "40%", 0.4),
        (parse_fraction, "0", 0),
        (parse_fraction, "100%", 1),
    ],
)
def test_what_users_write(read, text, value):
    assert read(text) == pytest.approx(value, rel=1e-15)


@each(
    "read, text, words",
    [
        (parse_bytes, "80", "hbm: '80' has no unit; write it as 80GB (1000-based) or 80GiB (1024-based)"),
        (parse_bytes, "80G", "hbm: '80G' is ambiguous; write 80GB (1000-based) or 80GiB (1024-based)"),
        (parse_bytes, "80M", "hbm: '80M' is ambiguous; write 80MB (1000-based) or 80MiB (1024-based)"),
        (parse_bytes, "", "hbm: expected a number such as 80GB (1000-based) or 80GiB (1024-based), found ''"),
        (parse_bytes, "many", "hbm: expected a number such as 80GB (1000-based) or 80GiB (1024-based), found 'many'"),
        (parse_bytes, "0GB", "hbm: expected more than zero, found '0GB'"),
        (parse_bytes, "-1GB", "hbm: expected more than zero, found '-1GB'"),
        (parse_bytes, "nan GB", "hbm: expected a finite number such as 80GB (1000-based) or 80GiB (1024-based), found 'nan GB'"),
        (parse_bytes, "inf GB", "hbm: expected a finite number such as 80GB (1000-based) or 80GiB (1024-based), found 'inf GB'"),
        (parse_bytes, "1e308GB", "hbm: '1e308GB' is too large to be meant"),
        (parse_bandwidth, "450", "hbm: '450' has no unit; write it as 450GB/s or 400Gbit/s"),
        (parse_bandwidth, "450GB", "hbm: unknown unit 'GB' in '450GB'; write it as 450GB/s or 400Gbit/s (units: "),
        (parse_flops_per_s, "989T", "hbm: unknown unit 'T' in '989T'; write it as 989TFLOP/s (units: "),
        (parse_flops_per_s, "989", "hbm: '989' has no unit; write it as 989TFLOP/s"),
        (parse_duration, "30", "hbm: '30' has no unit; write it as 30d, 12h, 5ms or 1us"),
        (parse_count, "4 apples", "hbm: unknown unit 'apples' in '4 apples'; write it as 4096, 4M (4,000,000) or 4Mi (4,194,304)"),
        (parse_count, "\u0664Mi", "hbm: expected a number such as 4096, 4M (4,000,000) or 4Mi (4,194,304), found '\u0664Mi'; write it in the digits 0 to 9"),
        (parse_count, "4\u0664Mi", "hbm: unknown unit '\u0664Mi' in"),
        (parse_count, "-4", "hbm: expected more than zero, found '-4'"),
        (parse_count, "4m", "hbm: unknown unit 'm' in '4m'; write it as"),
        (parse_money, "free", "hbm: expected a number such as 4.20, $4.20 or 5M$, found 'free'"),
        (parse_fraction, "140%", "hbm: expected a share from 0 to 1 (or 0% to 100%), found '140%'"),
        (parse_fraction, "-0.1", "hbm: expected a share from 0 to 1 (or 0% to 100%), found '-0.1'"),
        (parse_fraction, "0.4 x", "hbm: expected a share such as 0.4 or 40%, found '0.4 x'"),
    ],
)  # fmt: skip
def test_every_error_says_expected_found_and_how(read, text, words):
    with pytest.raises(UnitError) as caught:
        read(text, "hbm")
    assert str(caught.value).startswith(words)
    assert caught.value.exit_code == 2


#: All of ASCII, and letters, digits, signs and spaces that look like those of a number and are not.
ALPHABET = [chr(i) for i in range(128)] + list(
    "\u00a0\u2007\u202f\u200b\u00b2\u00bd\u0663\u096a\uff11\u2212\u221e\u00b5\u03bc\u0130\u1e9e\ud83d\U0001f600"
)


@pytest.mark.parametrize("read", [read for name, read in vars(units).items() if name.startswith("parse_")])
@given(text=st.text(ALPHABET, max_size=12))
def test_no_text_makes_a_parser_fail_otherwise_than_in_words(read, text):
    try:
        value = read(text)
    except UnitError as error:
        assert str(error)  # noqa: PT017
    else:
        assert math.isfinite(value)
        assert value >= 0


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (format_bytes, 0, "0 B"),
        (format_bytes, 512, "512 B"),
        (format_bytes, 2**30, "1 GiB"),
        (format_bytes, 95 * 2**30, "95 GiB"),
        (format_bandwidth, 2.765e12, "2.77 TB/s"),
        (format_count, 4096, "4,096"),
        (format_count, 999_600, "1M"),
        (format_count, 70553706496, "70.6B"),
        (format_flops, 8.2e23, "820,000 EFLOPs"),
        (format_flops_per_s, 1.97e14, "197 TFLOP/s"),
        (format_time, 0.0, "0 ns"),
        (format_time, 0.00056, "560 us"),
        (format_duration, 3.8e6, "44 days"),
        (format_duration, 5400, "1.50 hours"),
        (format_duration, 30, "30 s"),
        (format_money, 39_748_000, "$39.7M"),
        (format_money, 4.2, "$4.20"),
        (format_percent, 0.4032, "40.3 %"),
    ],
)
def test_what_is_shown(show, value, text):
    assert show(value) == text


def test_a_quantity_reads_text_and_numbers():
    size = Quantity("bytes", parse_bytes, format_bytes, "80GB")
    assert size.read("1GiB", "hbm") == 2**30
    assert size.read(7, "hbm") == 7
    for wrong in (True, [1], None):
        with pytest.raises(UnitError, match="hbm: expected bytes such as 80GB, found"):
            size.read(wrong, "hbm")
    for wrong in (math.inf, math.nan):
        with pytest.raises(UnitError, match="hbm: expected a finite number of bytes, found"):
            size.read(wrong, "hbm")
