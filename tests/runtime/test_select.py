"""The padded M, compared with a second implementation of the rule."""

from gemmpipe.runtime.select import coarsely_padded, finely_padded, padding_levels


def test_finely() -> None:
    for m in range(1, 9000):
        step = 128
        if m <= 4096:
            step = 64
        if m <= 1024:
            step = 32
        if m <= 256:
            step = 16
        while m % step:
            m += 1
        assert finely_padded(m) == m
    assert [finely_padded(m) for m in (1, 16, 17, 256, 257, 1024, 1025, 4096, 4097)] == [
        *(16, 16, 32, 256, 288, 1024, 1088, 4096, 4224)
    ]


def test_coarsely() -> None:
    for n in (1, 4096, 4097, 8192):
        for m in range(1, 20000):
            if m > 8192 and n > 4096:
                assert coarsely_padded(m, n) == 8192
                continue
            power = 1
            while power < m:
                power *= 2
            assert coarsely_padded(m, n) == power


def test_levels_ask_once_for_each_m_the_exact_first() -> None:
    assert padding_levels(16, 64) == {16: "exact"}
    assert padding_levels(17, 64) == {17: "exact", 32: "padded"}
    assert padding_levels(300, 64) == {300: "exact", 320: "padded", 512: "padded"}
    assert padding_levels(9000, 8192) == {9000: "exact", 9088: "padded", 8192: "padded"}
    assert list(padding_levels(9000, 4096)) == [9000, 9088, 16384]
