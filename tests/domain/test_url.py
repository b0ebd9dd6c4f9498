"""No shown URL and no error text of a driver contains the password, however badly written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genba.domain.url import mask_password, scrub_password, split_url
from genba.errors import BadOption


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:p%40ss@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:a@b@host:5/db?x=1", "postgresql://me:***@host:5/db?x=1"),
        ("postgresql://:pass@/db?host=/tmp", "postgresql://:***@/db?host=/tmp"),
        ("postgresql://me@host/db?password=pass&x=1", "postgresql://me@host/db?password=***&x=1"),
        ("postgresql://host/db?sslpassword=pass", "postgresql://host/db?sslpassword=***"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("postgresql://h1:5432,[::1]:5433,h3/db", "postgresql://h1:5432,[::1]:5433,h3/db"),
        ("mysql://root:pass@h/x", "mysql://root:***@h/x"),
        ("postgresql+psycopg://u:pass@h/x", "postgresql+psycopg://u:***@h/x"),
        ("postgresql://u:pass", "postgresql://u:***"),
        ("postgresql://u:pass/db", "postgresql://u:***/db"),
        ("u:pass@h/x", "u:***@h/x"),
        ("postgresql:u:pass@h", "postgresql:***@h"),
        ("host=h password='pass' dbname=x", "host=h password=***"),
        ("sqlite:////srv/a:b@c.db", "sqlite:////srv/a:b@c.db"),
        ("", ""),
    ],
)
def test_a_password_is_never_shown(url, shown):
    assert mask_password(url) == shown


@given(st.text(st.sampled_from("/?#@:%&=[]'\" aX9\n"), min_size=1))
def test_whatever_stands_in_a_password_none_of_it_is_shown(inside):
    url = f"postgresql://me:SEK{inside}RIT@host:5/db"

    assert mask_password(url) == "postgresql://me:***@host:5/db"
    driver = f'could not translate "SEK{inside}RIT" or "RIT@host" or "SEK"'
    text = scrub_password(driver, url)
    assert f"SEK{inside}RIT" not in text
    if set(inside) & set("/?#@"):  # it was cut there
        assert "RIT" not in text


@pytest.mark.parametrize("url", ["postgresql://u:a%2Fb@h/d", "postgresql://u@h/d?password=a%2Fb"])
def test_a_password_is_taken_out_of_the_words_of_a_driver(url):
    assert scrub_password('no "a%2Fb" or a/b here', url) == 'no "***" or *** here'


def test_words_without_a_password_stay_as_they_are():
    assert scrub_password("connection refused", "postgresql://me@host:5/db") == "connection refused"
    assert (
        scrub_password("connection refused", "postgresql://host:5/db?password=a/b@c")
        == "connection refused"
    )


@pytest.mark.parametrize("url", ["postgresql://u:[pass@h/x", "postgresql://u:pass\u2100@h/x"])
def test_what_cannot_be_split_is_named_without_its_password(url):
    with pytest.raises(BadOption, match="is not a URL") as raised:
        split_url(url)

    assert "pass" not in repr(raised.value)
    assert raised.value.__cause__ is None
