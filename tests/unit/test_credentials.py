"""Variables that hold credentials, and those that do not."""

from __future__ import annotations

import pytest

from paceline.credentials import is_secret_name, redact

SECRET = (
    *(
        "WANDB_API_KEY",
        "hf_token",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "DB_PASS",
        "DB_PWD",
    ),
    *(
        "PGPASSWORD",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_SAS_TOKEN",
        "SLURM_JWT",
        "MLFLOW_AUTH",
    ),
)
PUBLIC = (
    *(
        "MAX_TOKENS",
        "TOKENIZERS_PARALLELISM",
        "PWD",
        "OLDPWD",
        "SSH_AUTH_SOCK",
        "NCCL_DEBUG",
        "KEYBOARD",
    ),
    *(
        "GOOGLE_APPLICATION_CREDENTIALS",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
    ),
)


@pytest.mark.parametrize("name", [*SECRET, *PUBLIC])
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name) is (name in SECRET)


def test_the_path_of_a_key_file_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/sa-key.json")
    assert (
        redact("File /home/me/sa-key.json was not found")
        == "File /home/me/sa-key.json was not found"
    )
