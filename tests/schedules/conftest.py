import pytest

from tvmconv import schedule_definition


def forget_spaces():
    schedule_definition._declare_knobs.cache_clear()
    schedule_definition._make_space.cache_clear()


@pytest.fixture(autouse=True)
def spaces_of_its_own():
    """Some tests change constants on which spaces depend: none finds the spaces of another test."""
    forget_spaces()
    yield
    forget_spaces()
