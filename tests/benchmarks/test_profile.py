from benchmarks.profile import covered


def test_overlapping_ranges_count_once():
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4
    assert covered([(5, 6), (0, 10), (1, 2)]) == 10
    assert covered([(0, 1), (1, 2)]) == 2
    assert covered([]) == 0
