import pytest

from verl.rewards.exact import exact


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (" yes\n", "yes", 1),
        ("yes, no", "yes", 0),
        ("Yes", "yes", 0),
        ("", "yes", 0),
        ("", "", 1),
        ("5", 5, 1),
        ("b", ["a", "b"], 1),
        ("a" * 1_000_000, "b", 0),
    ],
)
def test_exact(response: str, truth: object, score: float) -> None:
    assert exact(response, truth) == score


def test_settings() -> None:
    assert exact("Yes", "yes", ignore_case=True) == 1
    assert exact(" yes", "yes", strip=False) == 0
