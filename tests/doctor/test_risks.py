"""What the doctor warns of although a backend fits."""

import pytest

FLOAT16 = ("--dtype", "float16")


def risks(doctor, *arguments) -> dict[str, str]:
    return {risk["what"]: risk["cure"] for risk in doctor(*arguments, sections=("risks",))["risks"]}


def cure_of(found: dict[str, str], words: str) -> str | None:
    """Return the cure of the one risk that has these words, or None if there is no such risk."""
    cures = [cure for what, cure in found.items() if words in what]
    assert len(cures) < 2
    return cures[0] if cures else None


def test_float16_with_the_guard(doctor):
    found = risks(doctor, "glm5", "--capability", "12.0", *FLOAT16)
    assert cure_of(found, "the residual is kept at 0.0625 of its value") == "--dtype bfloat16"


def test_float16_without_the_guard(doctor):
    found = risks(doctor, "deepseek_v3", "--capability", "12.0", *FLOAT16)
    assert cure_of(found, "guard against values beyond 65504 is not in this model class") == "--dtype bfloat16"
    assert cure_of(found, "the residual is kept") is None


def test_a_cure_that_does_not_cure_is_not_offered(doctor):
    """bfloat16 queries and a float16 cache: nobody serves them."""
    found = risks(doctor, "glm5", "--capability", "8.6", *FLOAT16, "--kv-cache-dtype", "float16")
    assert cure_of(found, "float16: ") == ""


def test_bfloat16_has_no_such_risk(doctor):
    assert cure_of(risks(doctor, "glm5", "--capability", "12.0", "--dtype", "bfloat16"), "float16") is None


@pytest.mark.parametrize(("capability", "warned"), [("12.0", True), ("8.6", False), ("9.0", False)])
def test_code_that_the_driver_compiles(doctor, capability, warned):
    found = risks(doctor, "llama", "--capability", capability)
    assert (cure_of(found, "PTX JIT") is not None) == warned


def test_a_backend_that_never_calls_flash_attention(doctor):
    found = risks(doctor, "glm5", "--capability", "12.0", "--dtype", "bfloat16")
    assert cure_of(found, "PTX JIT") is None


def test_what_is_compiled_at_the_first_start(doctor):
    found = risks(doctor, "glm5", "--capability", "8.6", *FLOAT16)
    assert any(what.startswith("attention, ") and "Triton compiles" in what for what in found)
    assert cure_of(risks(doctor, "llama", "--capability", "8.6"), "Triton compiles") is None
