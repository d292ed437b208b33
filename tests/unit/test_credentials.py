"""Variables that hold credentials, and those that do not."""

from __future__ import annotations

import pytest

from paceline.credentials import is_secret_name, public_variables, redact

SECRET = """
WANDB_API_KEY hf_token AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID DB_PASS DB_PWD TORCH_HUB_API_KEY GITHUB_PAT
SLACK_WEBHOOK_URL PGPASSWORD AZURE_STORAGE_CONNECTION_STRING AZURE_STORAGE_SAS_TOKEN SLURM_JWT MLFLOW_AUTH
"""
PUBLIC = """
MAX_TOKENS TOKENIZERS_PARALLELISM PWD PATH OLDPWD SSH_AUTH_SOCK NCCL_DEBUG KEYBOARD
GOOGLE_APPLICATION_CREDENTIALS AWS_SHARED_CREDENTIALS_FILE AWS_WEB_IDENTITY_TOKEN_FILE
"""


@pytest.mark.parametrize("name", (SECRET + PUBLIC).split())
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name) is (name in SECRET.split())


def test_the_path_of_a_key_file_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/sa-key.json")
    assert (
        redact("File /home/me/sa-key.json was not found")
        == "File /home/me/sa-key.json was not found"
    )


@pytest.mark.parametrize(
    "text",
    [
        "token 50257 is not in a vocabulary of 50000 (num_tokens=512, token: 50257)",
        "    token = next(tokens)",
        "tokens: 1024, tokenizer=GPT2TokenizerFast",
        "disaster: 3 hosts",
    ],
)
def test_words_of_models_are_shown(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "hf_{}",
        "token={}",
        "hf_token = '{}'",
        "api_key: {}",
        "'TORCH_HUB_API_KEY': '{}'",
        "Invalid Authorization: Bearer {}",
        "https://user:{}@host/repository.git",
    ],
)
def test_credentials_are_hidden(text: str) -> None:
    assert "aBcD1234" not in redact(text.format("aBcD1234" * 4))


def test_variables_are_shown_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("API_KEY", "abc"), ("HOME", "/hub"), ("URL", "https://me:abc1@host/x")):
        monkeypatch.setenv(f"TORCH_HUB_{name}", value)
    assert public_variables(("TORCH_HUB_",)) == {
        "TORCH_HUB_HOME": "/hub",
        "TORCH_HUB_URL": "https://***@host/x",
    }
