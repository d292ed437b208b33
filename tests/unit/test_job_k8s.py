"""`paceline job k8s`: golden files, the schemas of the API and of the CRDs, and wrong input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli import main
from paceline.exit_codes import ExitCode
from paceline.launch.options import read_options
from paceline.schedulers.yaml_text import Commented, to_yaml

DATA = Path(__file__).parents[1] / "data" / "jobs"
SCHEMAS = {
    (schema["apiVersion"], schema["kind"]): schema["schema"]
    for schema in (json.loads(file.read_text()) for file in DATA.glob("*.schema.json"))
}
# podFailurePolicy is stable since 1.31. Newer versions than those of the package cannot be checked.
VERSIONS = ("1.31", "1.34", "1.37")

# Write a golden file again with: cd tests/data/jobs && paceline job k8s LINE --force
CASES = {
    "one": "--name one /workspace/train.py --image me/train:1 -- --tag $(x)",
    "train": "/workspace/train.py --image registry.example:5000/me/train:1.2 --nodes 2 --gpus 8 "
    "--cpus 64 --memory 512G --time 1-00:00:00 --env NCCL_DEBUG=WARN --secret WANDB_API_KEY=wandb/key "
    "--storage 200Gi --storage-class nfs --namespace research -- --lr 0.1",
    "jobset": "--name jobset /workspace/train.py --image me/train:1 --kind jobset --nodes 4 --gpus 1 "
    "--grace 5m --claim shared --shm-size 512M --retries 0 --time 4h",
    "trainjob": "--name trainjob -m pack.train --image me/train:1 --kind trainjob --nodes 2 --cpus 4 "
    "--nproc-per-node 2 --user 0 --gpu-resource amd.com/gpu --run-folder /runs",
}


def _write(line: str, folder: Path) -> dict[str, str]:
    assert main.main(["job", "k8s", "--output", str(folder), *line.split()]) == ExitCode.OK
    return {file.name: file.read_text() for file in folder.iterdir()}


def _documents(name: str, folder: Path) -> dict[str, Any]:
    """The documents of a case by kind."""
    texts = _write(CASES[name], folder / name)
    return {d["kind"]: d for text in texts.values() for d in yaml.safe_load_all(text)}


@pytest.mark.parametrize("name", CASES)
def test_the_files_are_those_in_the_repository(name: str, tmp_path: Path) -> None:
    written = _write(CASES[name], tmp_path)
    golden = {file: (DATA / file).read_text() for file in written}
    assert written == golden, (
        f"if intended: cd tests/data/jobs && paceline job k8s {CASES[name]} --force"
    )


def test_all_golden_files_are_written_by_a_case(tmp_path: Path) -> None:
    written = {file for name in CASES for file in _write(CASES[name], tmp_path)}
    assert {file.name for file in DATA.glob("*.k8s.yaml")} == written


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_documents_fit_the_schema_of_kubernetes(name: str, version: str, tmp_path: Path) -> None:
    package = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    checked = 0
    for document in _documents(name, tmp_path).values():
        for plain in _plain(document):
            package.validate(plain, version, strict=True)
            checked += 1
    assert checked


def _plain(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of Kubernetes itself in a document: the document, or the Jobs of a JobSet in it."""
    if (document["apiVersion"], document["kind"]) not in SCHEMAS:
        return [document]
    spec = document["spec"]
    spec = spec.get("template", {}).get("spec", spec)
    templates = [job["template"] for job in spec.get("replicatedJobs", [])]
    job = {"apiVersion": "batch/v1", "kind": "Job"}
    return [job | {"metadata": {"name": "a"}, "spec": template["spec"]} for template in templates]


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_custom_resources_fit_their_schema(name: str, tmp_path: Path) -> None:
    package = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    for document in _documents(name, tmp_path).values():
        schema = SCHEMAS[document["apiVersion"], document["kind"]]
        package.Draft202012Validator(_strict(schema)).validate(document)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["JobSet"]["spec"]["failurePolicy"].update(maxRestart=1),
        lambda d: d["JobSet"]["spec"]["network"].update(enableDNSHostnames="yes"),
        lambda d: d["TrainJob"]["spec"].pop("runtimeRef"),
        lambda d: d["TrainJob"]["spec"]["trainer"].update(numNodes="2"),
        lambda d: d["TrainingRuntime"]["spec"]["mlPolicy"].update(nodes=2),
    ],
)
def test_the_schemas_notice_mistakes(change: Callable[[Any], object], tmp_path: Path) -> None:
    package = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    documents = _documents("jobset", tmp_path) | _documents("trainjob", tmp_path)
    change(documents)
    found = 0
    for document in documents.values():
        schema = SCHEMAS[document["apiVersion"], document["kind"]]
        found += len(list(package.Draft202012Validator(_strict(schema)).iter_errors(document)))
    assert found == 1


def _strict(schema: Any) -> Any:
    """A structural schema as a JSON schema in which unknown fields are errors."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {key: _strict(value) for key, value in schema.items() if not key.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields")
    # `metadata` has no properties in a CRD; a field may also be called "properties".
    if closed and schema.get("type") == "object" and "additionalProperties" not in schema:
        result["additionalProperties"] = False
    return result


def _container(documents: Mapping[str, Any]) -> tuple[Any, Any]:
    """The pod and its container."""
    spec = documents["Job"]["spec"]["template"]["spec"]
    return spec, spec["containers"][0]


def test_the_pods_meet_at_the_name_of_the_first(tmp_path: Path) -> None:
    """Kubernetes names a pod JOB-INDEX.SUBDOMAIN if a headless Service has the name of the subdomain."""
    documents = _documents("train", tmp_path)
    pod, container = _container(documents)
    service = documents["Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod["subdomain"] == service["metadata"]["name"] == "train"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "train"}
    options = read_options(
        [w.replace("$(JOB_COMPLETION_INDEX)", "0") for w in container["command"][2:]]
    )
    assert str(options.endpoint) == "train-0.train:29400"
    assert options.endpoint is not None
    assert options.endpoint.is_host
    assert options.config.min_nodes == options.config.max_nodes == 2
    assert options.config.nproc_per_node == 8
    assert options.args.training_script == "/workspace/train.py"
    assert documents["Job"]["spec"]["completionMode"] == "Indexed"
    assert documents["Job"]["spec"]["completions"] == documents["Job"]["spec"]["parallelism"] == 2


def test_the_command_for_a_runtime_of_kubeflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch-distributed` sets these variables; the documentation has the command."""
    variables = {"NNODES": "2", "NPROC_PER_NODE": "4", "NODE_RANK": "1", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("PET_MASTER_ADDR", "a-node-0-0.a")
    page = (DATA.parents[2] / "docs" / "howto" / "kubernetes.md").read_text()
    (line,) = re.findall(r"^paceline run (.*)$", page, re.M)
    options = read_options(line.replace("$(PET_MASTER_ADDR)", "a-node-0-0.a").split())
    assert str(options.endpoint) == "a-node-0-0.a:29400"
    assert (options.node_rank, options.config.max_nodes, options.config.nproc_per_node) == (1, 2, 4)


def test_a_preemption_is_no_failure(tmp_path: Path) -> None:
    job = _documents("train", tmp_path)["Job"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    ignored = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
    assert ignored[0]["onExitCodes"]["values"] == [ExitCode.UNAVAILABLE, ExitCode.PREEMPTED]
    assert ignored[1]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["backoffLimit"] == 2, "one retry of two pods"
    assert job["activeDeadlineSeconds"] == 86400


def test_the_grace_period_is_longer_than_that_of_the_launcher(tmp_path: Path) -> None:
    documents = _documents("jobset", tmp_path)
    jobs = documents["JobSet"]["spec"]["replicatedJobs"]
    pod = jobs[0]["template"]["spec"]["template"]["spec"]
    variables = {v["name"]: v.get("value") for v in pod["containers"][0]["env"]}
    assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "300"
    assert pod["terminationGracePeriodSeconds"] == 315


def test_shared_memory_fits_into_the_memory(tmp_path: Path) -> None:
    def size(line: str, folder: Path) -> str:
        (text,) = _write(f"/a/train.py --image a {line}", folder).values()
        for document in yaml.safe_load_all(text):
            if document["kind"] == "Job":
                volumes = document["spec"]["template"]["spec"]["volumes"]
                return str(volumes[0]["emptyDir"]["sizeLimit"])
        raise AssertionError(text)

    assert size("--gpus 8", tmp_path / "a") == "16Gi"
    assert size("--gpus 8 --memory 20G", tmp_path / "b") == "10Gi"
    assert size("--memory 1G --shm-size 100M", tmp_path / "c") == "100Mi"


def test_values_of_secrets_are_references(tmp_path: Path) -> None:
    _, container = _container(_documents("train", tmp_path))
    by_name = {variable["name"]: variable for variable in container["env"]}
    assert by_name["WANDB_API_KEY"] == {
        "name": "WANDB_API_KEY",
        "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}},
    }


def test_the_words_of_the_script_are_not_replaced(tmp_path: Path) -> None:
    """Kubernetes replaces $(NAME) in commands, unless it is written $$(NAME)."""
    _, container = _container(_documents("one", tmp_path))
    assert container["command"][-2:] == ["--tag", "$$(x)"]


def test_the_claim_is_not_deleted_with_the_job(tmp_path: Path) -> None:
    written = _write(CASES["train"], tmp_path)
    assert sorted(written) == ["train-runs.k8s.yaml", "train.k8s.yaml"]
    assert "PersistentVolumeClaim\n" not in written["train.k8s.yaml"]
    claim = yaml.safe_load(written["train-runs.k8s.yaml"])
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_claim_with_the_name_of_the_job_has_a_file_of_its_own(tmp_path: Path) -> None:
    written = _write("/a/train.py --image me/train:1 --claim train --storage 1Gi", tmp_path)
    assert sorted(written) == ["train-claim.k8s.yaml", "train.k8s.yaml"]
    assert yaml.safe_load(written["train-claim.k8s.yaml"])["kind"] == "PersistentVolumeClaim"
    assert "kind: Job" in written["train.k8s.yaml"]


def test_the_next_steps_are_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write("/a/train.py --image me/train --nodes 6 --namespace research", tmp_path)
    steps = [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert steps == [
        "kubectl -n research get pvc train-runs    # the claim must exist",
        f"kubectl apply -f {tmp_path}/train.k8s.yaml",
        "kubectl -n research logs -f -l batch.kubernetes.io/job-name=train --prefix --max-log-requests 6",
        "note: me/train has no tag; pods that start later may get another image",
    ]


LONG = "a" * 62  # the pod name-0 would have 64
WRONG = {
    "": "missing: --image.",
    "--image Me/train:1": "--image 'Me/train:1' is not a valid image name.",
    "--image me/train:": "--image 'me/train:' is not a valid image name.",
    "--image a --name Train": "--name 'Train' is not a valid Kubernetes name.",
    "--image a --name my_train": "--name 'my_train' is not a valid Kubernetes name.",
    "--image a --name 1st": "--name '1st' is not a valid Kubernetes name.",
    "--image a --name a-": "--name 'a-' is not a valid Kubernetes name.",
    "--image a --name a.b": "--name 'a.b' is not a valid Kubernetes name.",
    f"--image a --name {LONG}": f"--name '{LONG}' is not a valid Kubernetes name. It has 62 characters.",
    "--image a --kind pod": "'pod' is not a valid --kind; use one of: job, jobset, trainjob.",
    "--image a --claim A": "--claim 'A' is not a valid Kubernetes name.",
    "--image a --namespace a.b": "--namespace 'a.b' is not a valid Kubernetes name.",
    "--image a --storage-class x": "--storage-class has no effect without --storage.",
    "--image a --run-folder runs": "--run-folder is 'runs', and a volume cannot be mounted there.",
    "--image a --memory 1G --shm-size 2G": "/dev/shm has 2048 MiB, and --memory is 1024 MiB.",
    "--image a --memory 1M": "/dev/shm has 1 MiB, and --memory is 1 MiB.",
    "--image a --gpu-resource a:b": "--gpu-resource 'a:b' is not a valid resource name.",
    **{
        f"--image a --run-folder {path}": f"--run-folder is '{path}', and a volume cannot be mounted there."
        for path in ("/workspace", "/dev/shm", "/opt/venv/a", "/a/..")
    },
    "--image a --secret A": "--secret A needs the name of a Secret and its key.",
    "--image a --secret A=b": "--secret A needs the name of a Secret and its key.",
    "--image a --retries -1": "--retries must be 0 or more, and is -1.",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["job", "k8s", "/a/train.py", "--output", str(tmp_path / "out"), *line.split()]
    try:
        code = main.main(words)
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == ExitCode.USAGE
    printed = capsys.readouterr()
    assert (printed.out, printed.err.splitlines()[0]) == ("", f"paceline job k8s: {WRONG[line]}")
    assert "  fix:   " in printed.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "has_dots", "letter_first"),
    [
        ("--name", False, True),
        ("--namespace", False, False),
        ("--claim", True, False),
        ("--storage 1G --storage-class", True, False),
    ],
)
def test_the_rule_of_a_name_is_its_own(
    option: str,
    has_dots: bool,
    letter_first: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["job", "k8s", "/a/train.py", "--image", "a", "--output", str(tmp_path)]
    for name, accepted in (("A", False), ("a.b", has_dots), ("1a", not letter_first)):
        code = main.main([*words, "--force", *option.split(), name])
        assert code == (ExitCode.OK if accepted else ExitCode.USAGE), name
        if code:
            why = capsys.readouterr().err
            assert ("hyphens and dots" in why) == has_dots
            assert ("the first is a letter" in why) == letter_first


def test_root_is_left_to_the_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime = _documents("trainjob", tmp_path)["TrainingRuntime"]
    assert "runAsUser" not in json.dumps(runtime)
    with pytest.raises(SystemExit):
        main.main(["job", "k8s", "--help"])
    assert "0 leaves them to the image" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("/a/My_Train-2.py", "my-train-2"),
        ("/a/_train_.py", "train"),
        ("/a/train.v2.py", "train-v2"),
    ],
)
def test_the_name_of_the_script_becomes_a_name_of_kubernetes(
    script: str, name: str, tmp_path: Path
) -> None:
    assert list(_write(f"{script} --image a", tmp_path)) == [f"{name}.k8s.yaml"]


def test_a_script_without_a_usable_name_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["job", "k8s", "/a/01.py", "--image", "a", "--output", str(tmp_path)]
    assert main.main(words) == ExitCode.USAGE
    assert "the name of the script '01' is not a valid Kubernetes name." in capsys.readouterr().err


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": [1, True, "x", {"c": "d", "e": {"f": []}}]}},
        [
            "yes",
            "No",
            "on",
            "null",
            "~",
            "1",
            "1.5",
            "1e3",
            "0x1f",
            "12:30",
            "2026-01-05",
            ".5",
            "=",
            "<<",
        ],
        [
            "a: b",
            "a #b",
            "- a",
            "-",
            "--",
            "--a=b",
            "-a",
            "a:",
            ":a",
            "&a",
            "*a",
            "!a",
            "%a",
            "@a",
            "`a",
        ],
        [
            "",
            " a",
            "a ",
            "a\tb",
            "é",
            "\U0001f600 \\ud83d\\ude00",
            '"',
            "'",
            "\\",
            "a\\nb",
            "{a}",
            "[a]",
            "a,b",
            "$(A)",
            "512Gi",
            "5G",
        ],
        {"a b": 1, "nvidia.com/gpu": "8", "on": 2, "1": 3},
        [{}, [], [[1, 2], [3]], {"a": None}],
        [-1, 0, 2.5],
    ],
)
def test_yaml_is_read_back(value: Any) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


def test_yaml_has_the_comments() -> None:
    value = {"a": Commented([Commented({"b": 1}, "first"), 2], "why " * 40)}
    text = to_yaml(value, {"c": 3}, comment="head")
    assert list(yaml.safe_load_all(text)) == [{"a": [{"b": 1}, 2]}, {"c": 3}]
    assert text.startswith("# head\n# why why")
    assert "\n  # first\n  - b: 1\n" in text
    assert max(map(len, text.splitlines())) <= 100
