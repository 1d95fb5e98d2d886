"""What counts as a secret, and what does not."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datastates.system.logs import MASK, arguments, is_secret, named, text

SECRET = "s3cr3t-Value/9"


@pytest.mark.parametrize(
    "name",
    [
        "token", "--token", "hf_token", "HF_TOKEN", "authToken", "password", "--db-password", "PGPASSWORD", "sslpassword", "db.passwd",
        "WANDB_API_KEY", "apiKey", "apikey", "AWS_SECRET_ACCESS_KEY", "secret", "client_secret", "private_key", "DB_PASS", "--pass",
        "optimizer.wandb.api_key", "passphrase", "credentials", "Authorization", "cookie", "secretKey", "access-key",
    ],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokens", "max_tokens", "num_tokens", "tokenizer", "token_file", "--token-file", "pad_token", "eos_token",
        "token_dim", "key", "keys",
        "sort_key",
        "forward_pass", "password_file",
        "author", "secretary", "lr", "", "---", "monkey", "passes", "hidden_size",
        "pad_token_id",
    ],
)  # fmt: skip
def test_names_of_what_is_none(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("postgresql://me:{}@db.example/x", "postgresql://me:***@db.example/x"),
        (
            "postgresql+psycopg://me:a@b:{}@db.example:5432/x",
            "postgresql+psycopg://me:***@db.example:5432/x",
        ),
        (
            "at postgresql://me:{}/a?b#c'd@db.example/x, later",
            "at postgresql://me:***@db.example/x, later",
        ),
        (
            "postgres://me:{0}/a@db/x and postgresql+psycopg://you:{0}?@db/y",
            "postgres://me:***@db/x and postgresql+psycopg://you:***@db/y",
        ),
        ("postgresql://me@corp:{}@db/x", "postgresql://me@corp:***@db/x"),
        ('PostgreSQL://me:"{}://x@db/x?user=a@b', "PostgreSQL://me:***@db/x?user=a@b"),
        ("at https://:{}@host/path, later", "at https://:***@host/path, later"),
        (
            "postgresql://db/x?user=me&password={}&sslmode=require",
            "postgresql://db/x?user=me&password=***&sslmode=require",
        ),
        (
            "https://b.s3.example/k?X-Amz-Signature={}&X-Amz-Date=1",
            "https://b.s3.example/k?X-Amz-Signature=***&X-Amz-Date=1",
        ),
        ("https://maps.example/?key={}", "https://maps.example/?key=***"),
        (
            "https://maps.example/?page=2&key='{0}'&key=\"{0}\"",
            "https://maps.example/?page=2&key='***'&key=\"***\"",
        ),
        ("Authorization: Bearer {}", "Authorization: Bearer ***"),
        ("with hf_abcdefghijklmnopqrstuv and AKIAABCDEFGHIJKLMNOP", "with *** and ***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl", "***"),
    ],
)
def test_secrets_in_a_text(said: str, shown: str) -> None:
    said = said.format(SECRET.replace("/", "_"))
    assert text(said) == shown
    assert text(shown) == shown


@pytest.mark.parametrize(
    "said",
    [
        "git@host:a/b",
        "ssh://git@host/x",
        "postgresql://me@db/x",
        "https://h/p?q=token&page=2",
        "C:/a",
        "runs/main",
        "12:30@noon",
        "a://b:80/c@d",
    ],
)
def test_texts_without_secrets_stay(said: str) -> None:
    assert text(said) == said
    assert arguments([said]) == (said,)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--token", SECRET, "--lr", "0.1"], ["--token", MASK, "--lr", "0.1"]),
        (["--token", "--lr"], ["--token", "--lr"]),
        (["--api-key", "-" + SECRET], ["--api-key", MASK]),
        ([f"--password={SECRET}"], ["--password=***"]),
        ([f"HF_TOKEN={SECRET}", "train.py"], ["HF_TOKEN=***", "train.py"]),
        ([f"+wandb.api_key='{SECRET}'"], ["+wandb.api_key='***'"]),
        ([f'password="two words {SECRET}'], ['password="***"']),
        ([f"db_password: 'a, {SECRET}\nport: 5"], ["db_password: '***'\nport: 5"]),
        (
            ['{"db": {"password": "' + SECRET + '", "port": 5}}'],
            ['{"db": {"password": "***", "port": 5}}'],
        ),
        ([f"--set=auth.token={SECRET}"], ["--set=auth.token=***"]),
        ([f"host=db password={SECRET} user=me"], ["host=db password=*** user=me"]),
        ([f'token="{SECRET}" x?token="{SECRET}"'], ['token="***" x?token="***"']),
        ([f'token="a {SECRET}"token="{SECRET}"'], ['token="***"token="***"']),
        ([f"token='a '\"{SECRET}\", lr=1"], ["token='***', lr=1"]),
        ([f'echo "token={SECRET}" "{{lr}}"'], ['echo "token=***" "{lr}"']),
        (
            ["sh", "-c", f"train --token {SECRET} --save-token --lr 1"],
            ["sh", "-c", "train --token *** --save-token --lr 1"],
        ),
        ([f"Authorization: Bearer {SECRET}", "-H"], ["Authorization: ***", "-H"]),
        (
            ["--repo", f"postgresql://me:{SECRET.replace('/', '')}@db/x"],
            ["--repo", "postgresql://me:***@db/x"],
        ),
        (["--token-file", "/home/me/token", "--max-tokens", "128", "--pad_token=<pad>"], None),
        (["train.py", "--save-token", "--epochs=3", ""], None),
    ],
)
def test_secrets_on_a_command_line(argv: list[str], shown: list[str] | None) -> None:
    if argv[1:2] == ["--save-token"]:
        shown = argv  # a flag that is followed by another hides nothing
    assert list(arguments(argv)) == (argv if shown is None else shown)
    assert SECRET not in " ".join(arguments(argv))


def test_secrets_of_a_configuration() -> None:
    config = {"lr": 0.1, "db.password": SECRET, "pin.secret": 1234, "hf_token": SECRET, "n_token": 7,
              "use_token": True, "eos_token": "</s>",
              "url": f"postgresql://me:{SECRET.replace('/', '')}@db/x", "empty.password": "", "none.secret": None}  # fmt: skip
    assert named(config) == config | {
        "db.password": MASK, "pin.secret": MASK, "hf_token": MASK, "url": "postgresql://me:***@db/x"
    }  # fmt: skip


PIECES = [
    "token=",
    'token="',
    "token: ",
    "--token ",
    "Bearer ",
    "https://a:b@c/",
    "?",
    "&",
    '"',
    "'",
    ",",
    " ",
    "-",
    MASK,
    "word",
]
texts = st.text() | st.lists(st.sampled_from(PIECES)).map("".join)


@example(['?token="'], {"said": "?token='"})
@example(['?token=token="a,'], {})
@example(["--token word", ""], {})
@example(["token=\"a''"], {})
@given(
    st.lists(texts),
    st.dictionaries(
        st.text(), st.one_of(texts, st.integers(), st.none(), st.booleans(), st.floats())
    ),
)
def test_masking_twice_is_masking_once(argv: list[str], config: dict[str, object]) -> None:
    assert arguments(arguments(argv)) == arguments(argv)
    once = named(config)
    assert repr(named(once)) == repr(once)


def test_a_long_word_is_masked_in_no_time() -> None:
    began = time.process_time()
    assert arguments(["--code=" + "x" * 20_000]) == ("--code=" + "x" * 20_000,)
    assert time.process_time() - began < 5.0
