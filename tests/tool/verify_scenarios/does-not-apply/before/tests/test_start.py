from vllm import engine


def test_start():
    assert engine.start(5) == 1
