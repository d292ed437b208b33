"""Kubernetes: an Indexed Job with a headless Service, a JobSet, or a TrainJob of Kubeflow's trainer.

Sources: the Kubernetes API reference (batch/v1 Job, podFailurePolicy; core/v1 Pod), jobset.x-k8s.io/v1alpha2,
and trainer.kubeflow.org/v1alpha1.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

from paceline.command_line import CommandParser, not_negative_count
from paceline.errors import ConfigError
from paceline.exit_codes import ExitCode
from paceline.schedulers.request import (
    PORT,
    RUN_FOLDER,
    SHUTDOWN_TIMEOUT,
    USER,
    JobFiles,
    JobRequest,
    add_shm_size,
    check_image,
    check_is_in_image,
    check_run_folder,
    memory_mib,
)
from paceline.schedulers.yaml_text import Commented, to_yaml

HELP = "write a Job with a Service for Kubernetes, a JobSet, or a TrainJob of Kubeflow"
EXAMPLES = {
    "paceline job k8s train.py --image registry.example/me/train:1 --nodes 2 --gpus 8": "an Indexed "
    "Job with a headless Service in train.k8s.yaml",
    "paceline job k8s train.py --image me/train:1 --kind trainjob --nodes 2 -- --lr 0.1": "a TrainJob; "
    "--lr is the script's",
    "paceline job k8s train.py --image me/train:1 --secret WANDB_API_KEY=wandb/key": "the value is the "
    "key `key` of the Secret `wandb`",
    "paceline job k8s train.py --image me/train:1 --storage 100Gi": "also the claim of a volume for "
    "the run folder",
}
WITHOUT: tuple[str, ...] = ()

KINDS = ("job", "jobset", "trainjob")
_CONTAINER = "node"  # the name that Kubeflow's runtimes use
# How long a pod waits for the others, which may still be pending or pull their image.
_JOIN_TIMEOUT_S = 1800
_DNS_LABEL = 63
_KUBECTL_LOGS = 5  # pods that `kubectl logs -f` follows without an option
_RESOURCE = re.compile(r"([a-z0-9][a-z0-9.-]*/)?[A-Za-z0-9][\w.-]*")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
# In words, for errors.
_JOB_RULE = (
    "lower-case letters, digits and hyphens; the first is a letter, and the last is not a hyphen"
)
_LABEL_RULE = "lower-case letters, digits and hyphens; the first and the last are not hyphens"
_SUBDOMAIN_RULE = (
    "lower-case letters, digits, hyphens and dots; each part between dots begins and ends with a letter or "
    "digit"
)


def add_options(parser: CommandParser) -> None:
    """Add the options that only Kubernetes has."""
    parser.add_argument(
        "--image",
        required=True,
        metavar="IMAGE",
        help="the container image, with paceline and the script",
    )
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="job",
        help="a Job of Kubernetes itself, a JobSet, or a TrainJob of Kubeflow (job)",
    )
    parser.add_argument(
        "--retries",
        type=not_negative_count,
        default=1,
        metavar="N",
        help="how often all pods start again after a failure that is not a preemption (1)",
    )
    parser.add_argument(
        "--claim",
        default="",
        metavar="NAME",
        help="the PersistentVolumeClaim of the run folder (default: NAME-runs)",
    )
    parser.add_argument(
        "--storage",
        type=memory_mib,
        metavar="SIZE",
        help="also write a file with that claim, of this size; all nodes read and write it",
    )
    parser.add_argument(
        "--storage-class", default="", metavar="NAME", help="the StorageClass of the claim"
    )
    add_shm_size(parser, note=", which counts as memory of the pod")
    parser.add_argument(
        "--gpu-resource",
        default="nvidia.com/gpu",
        metavar="NAME",
        help="the resource that --gpus counts (nvidia.com/gpu)",
    )
    parser.add_argument(
        "--user",
        type=not_negative_count,
        default=USER,
        metavar="UID",
        help=f"the user and group of the processes ({USER}); 0 leaves them to the image",
    )
    parser.add_argument(
        "--namespace", default="", metavar="NAME", help="the namespace of the objects"
    )


def write(request: JobRequest, options: argparse.Namespace) -> JobFiles:
    """Return the file of the job, and that of the claim if `--storage` is given.

    Raises:
        ConfigError: names, images, secrets or sizes that Kubernetes refuses.
    """
    return _Writer(request, options).files()


class _Writer:
    """The documents of one request."""

    def __init__(self, request: JobRequest, options: argparse.Namespace) -> None:
        self.request = request
        self.options = options
        self.name = _job_name(request, options.kind)
        self.claim = options.claim or f"{self.name}-runs"
        self.run_folder = request.run_folder or RUN_FOLDER
        self.shm_mib = request.shm_mib(options.shm_size)
        self._check()

    def _check(self) -> None:
        options, request = self.options, self.request
        check_is_in_image(request)
        check_image("--image", request.image)
        for option, value in (("--claim", self.claim), ("--storage-class", options.storage_class)):
            if value and not (_SUBDOMAIN.fullmatch(value) and len(value) <= 253):
                raise _bad_name(option, value, 253, _SUBDOMAIN_RULE)
        if options.namespace and not _is_label(options.namespace):
            raise _bad_name("--namespace", options.namespace, _DNS_LABEL, _LABEL_RULE)
        if options.storage_class and options.storage is None:
            raise ConfigError(
                "--storage-class has no effect without --storage.",
                fix="give the size of the claim with --storage, or leave --storage-class out.",
            )
        check_run_folder(self.run_folder)
        if not _RESOURCE.fullmatch(options.gpu_resource):
            raise ConfigError(
                f"--gpu-resource {options.gpu_resource!r} is not a valid resource name.",
                fix="give DOMAIN/NAME, such as nvidia.com/gpu.",
            )
        if request.memory_mib is not None and self.shm_mib >= request.memory_mib:
            raise ConfigError(
                f"/dev/shm has {self.shm_mib} MiB, and --memory is {request.memory_mib} MiB.",
                why="files in /dev/shm count as memory of the pod.",
                fix="give more --memory or less --shm-size.",
            )

    def files(self) -> JobFiles:
        """The texts, and what to do with them."""
        file, claim_file = f"{self.name}.k8s.yaml", f"{self.claim}.k8s.yaml"
        if claim_file == file:
            claim_file = f"{self.claim}-claim.k8s.yaml"
        kinds = {"job": self._job, "jobset": self._jobset, "trainjob": self._trainjob}
        files = {
            file: to_yaml(
                *kinds[self.options.kind](),
                comment="Written by `paceline job k8s`. Change it as you like; it holds no secrets.",
            )
        }
        namespace = f" -n {self.options.namespace}" if self.options.namespace else ""
        steps = []

        def path(name: str) -> str:
            return shlex.quote(os.path.join(self.options.output, name))

        if self.options.storage is not None:
            # A file of its own: `kubectl delete -f` of the job must not delete the checkpoints.
            files[claim_file] = to_yaml(self._claim_document())
            steps.append(
                f"kubectl apply -f {path(claim_file)}    # once; deleting it deletes the checkpoints"
            )
        else:
            steps.append(f"kubectl{namespace} get pvc {self.claim}    # the claim must exist")
        steps.append(f"kubectl apply -f {path(file)}")
        label, nodes = "=".join(self._pod_label), self.request.nodes
        many = f" --max-log-requests {nodes}" if nodes > _KUBECTL_LOGS else ""
        steps.append(f"kubectl{namespace} logs -f -l {label} --prefix{many}")
        if ":" not in self.request.image.rpartition("/")[2]:
            steps.append(
                f"note: {self.request.image} has no tag; pods that start later may get another image"
            )
        return JobFiles(files, steps)

    @property
    def _pod_label(self) -> tuple[str, str]:
        if self.options.kind == "job":
            return "batch.kubernetes.io/job-name", self.name
        return "jobset.sigs.k8s.io/jobset-name", self.name

    @property
    def host(self) -> str:
        """The name under which all pods reach the first one."""
        first = f"{self.name}-0" if self.options.kind == "job" else f"{self.name}-{_CONTAINER}-0-0"
        return f"{first}.{self.name}"

    def _metadata(self, name: str) -> dict[str, Any]:
        namespace = {"namespace": self.options.namespace} if self.options.namespace else {}
        return {"name": name, **namespace, "labels": {"app.kubernetes.io/name": self.name}}

    def _claim_document(self) -> dict[str, Any]:
        options = self.options
        several = self.request.nodes > 1
        storage_class = {"storageClassName": options.storage_class} if options.storage_class else {}
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": self._metadata(self.claim),
            "spec": {
                "accessModes": ["ReadWriteMany" if several else "ReadWriteOnce"],
                **storage_class,
                "resources": {"requests": {"storage": _quantity(options.storage)}},
            },
        }

    def _job(self) -> list[Any]:
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(self.name),
            "spec": {
                "clusterIP": Commented("None", "Headless: a name for each pod, no load balancing."),
                "publishNotReadyAddresses": Commented(
                    True, "The pods must find each other before they are ready."
                ),
                "selector": dict([self._pod_label]),
                "ports": [{"name": "rendezvous", "port": PORT}],
            },
        }
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata(self.name),
            "spec": self._job_spec({"subdomain": self.name}),
        }
        return [service, job] if self.request.nodes > 1 else [job]

    def _jobset_spec(self, *, of_trainjob: bool) -> dict[str, Any]:
        label = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
        return {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": Commented(
                    self.options.retries,
                    "When the Job has failed, all pods start again, at most this often.",
                ),
                "rules": [
                    {
                        "name": "doNotRestart",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": _CONTAINER,
                    "replicas": 1,
                    "template": {
                        **({"metadata": label} if of_trainjob else {}),
                        "spec": self._job_spec({}, with_command=not of_trainjob),
                    },
                }
            ],
        }

    def _jobset(self) -> list[Any]:
        return [
            {
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "metadata": self._metadata(self.name),
                "spec": self._jobset_spec(of_trainjob=False),
            }
        ]

    def _trainjob(self) -> list[Any]:
        runtime = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": self._metadata(self.name),
            "spec": {
                "mlPolicy": Commented(
                    {"numNodes": self.request.nodes},
                    "Without `torch: {}`: the command below says how the nodes meet.",
                ),
                "template": {"spec": self._jobset_spec(of_trainjob=True)},
            },
        }
        job = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": self._metadata(self.name),
            "spec": {
                "runtimeRef": Commented(
                    {
                        "apiGroup": "trainer.kubeflow.org",
                        "kind": "TrainingRuntime",
                        "name": self.name,
                    },
                    "A runtime of its own, because a TrainJob cannot set a podFailurePolicy.",
                ),
                "trainer": {
                    "image": self.request.image,
                    "numNodes": self.request.nodes,
                    "command": Commented(self._command(), _NO_PROBES),
                },
            },
        }
        return [runtime, job]

    def _job_spec(self, pod: Mapping[str, Any], *, with_command: bool = True) -> dict[str, Any]:
        request = self.request
        if self.options.kind == "job":
            limit = request.nodes * self.options.retries
            note = (
                f"A failure ends all {request.nodes} pods, and each of them counts."
                if request.nodes > 1
                else "How many failures are followed by another start."
            )
        else:
            limit, note = 0, "The failurePolicy above starts all pods again."
        deadline = {"activeDeadlineSeconds": request.time_s} if request.time_s else {}
        return {
            "completionMode": "Indexed",
            "completions": request.nodes,
            "parallelism": request.nodes,
            "backoffLimit": Commented(limit, note),
            **deadline,
            "podFailurePolicy": {"rules": _FAILURE_RULES},
            "template": {
                "metadata": {"labels": {"app.kubernetes.io/name": self.name}},
                "spec": self._pod(pod, with_command=with_command),
            },
        }

    def _pod(self, more: Mapping[str, Any], *, with_command: bool) -> dict[str, Any]:
        user = self.options.user
        identity = {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
        return {
            "restartPolicy": Commented("Never", "podFailurePolicy needs it."),
            **more,
            "terminationGracePeriodSeconds": Commented(
                self.request.scheduler_grace_s,
                f"{self.request.grace_s} s to finish a step and to save (--grace), and "
                f"{self.request.scheduler_grace_s - self.request.grace_s} s for the launcher to end.",
            ),
            "enableServiceLinks": Commented(
                False, "A Service named master would set MASTER_PORT in each pod."
            ),
            "automountServiceAccountToken": False,
            "securityContext": {
                **(identity if user else {}),
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self._container(with_command=with_command)],
            "volumes": [
                {
                    "name": "shm",
                    "emptyDir": {"medium": "Memory", "sizeLimit": _quantity(self.shm_mib)},
                },
                {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}},
            ],
        }

    def _container(self, *, with_command: bool) -> dict[str, Any]:
        request = self.request
        variables: list[Any] = [
            Commented(
                {"name": SHUTDOWN_TIMEOUT, "value": str(request.grace_s)},
                "How long the launcher waits after SIGTERM before it kills its ranks.",
            )
        ]
        variables += [
            {"name": name, "value": _escaped(value)} for name, value in request.variables.items()
        ]
        for name, reference in request.secrets.items():
            secret, key = _secret_key(name, reference)
            of_secret = {"secretKeyRef": {"name": secret, "key": key}}
            variables.append({"name": name, "valueFrom": of_secret})
        resources = {"resources": self._resources()} if self._resources() else {}
        return {
            "name": _CONTAINER,
            "image": request.image,
            **({"command": Commented(self._command(), _NO_PROBES)} if with_command else {}),
            "env": variables,
            **resources,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": "shm", "mountPath": "/dev/shm"},
                {"name": "runs", "mountPath": self.run_folder},
            ],
        }

    def _command(self) -> list[str]:
        launch = [f"--log-dir={self.run_folder}"]  # reports of failures outlive the pod
        if self.request.nodes > 1:
            launch += [
                f"--nnodes={self.request.nodes}",
                "--node-rank=$(JOB_COMPLETION_INDEX)",
                f"--host={self.host}:{PORT}",
                f"--rdzv-conf=join_timeout={_JOIN_TIMEOUT_S}",
            ]
        words = self.request.command(*launch)
        first = next(i for i, word in enumerate(words) if word.startswith("--max-restarts=")) + 1
        return [*words[:first], *map(_escaped, words[first:])]

    def _resources(self) -> dict[str, Any]:
        request = self.request
        amounts: dict[str, Any] = {}
        if request.cpus is not None:
            amounts["cpu"] = str(request.cpus)
        if request.memory_mib is not None:
            amounts["memory"] = _quantity(request.memory_mib)
        gpus = {self.options.gpu_resource: str(request.gpus)} if request.gpus else {}
        # Limits equal to requests: the launcher divides the cores of the limit among the ranks.
        both = {"requests": amounts} if amounts else {}
        return {**both, "limits": {**amounts, **gpus}} if amounts or gpus else {}


_NO_PROBES = (
    "The launcher is the first process of the container and receives SIGTERM. There are no probes: the "
    "launcher ends when its ranks fail, and a probe could kill a long step or save."
)
_FAILURE_RULES = [
    Commented(
        {
            "action": "Ignore",
            "onExitCodes": {
                "containerName": _CONTAINER,
                "operator": "In",
                "values": [int(ExitCode.UNAVAILABLE), int(ExitCode.PREEMPTED)],
            },
        },
        f"{ExitCode.PREEMPTED:d}: preempted, and saved. {ExitCode.UNAVAILABLE:d}: the first pod was lost. "
        "Both ask to be started again.",
    ),
    Commented(
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        "The cluster evicted the pod.",
    ),
    Commented(
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": _CONTAINER,
                "operator": "In",
                "values": [int(ExitCode.USAGE)],
            },
        },
        "The command line is wrong: another start would not help.",
    ),
]


def _job_name(request: JobRequest, kind: str) -> str:
    name = request.default_name  # a script may be called My_train.py
    # The name of the last pod is a host name; Kubernetes adds a hyphen and 5 letters to that of a JobSet.
    last = (
        f"-{request.nodes - 1}" if kind == "job" else f"-{_CONTAINER}-0-{request.nodes - 1}-abcde"
    )
    longest = _DNS_LABEL - len(last)
    if not _is_label(name) or not name[0].isalpha() or len(name) > longest:
        option = "--name" if request.name else "the name of the script"
        raise _bad_name(option, name, longest, _JOB_RULE)
    return name


def _bad_name(option: str, name: str, longest: int, rule: str) -> ConfigError:
    long = f" It has {len(name)} characters." if len(name) > longest else ""
    return ConfigError(
        f"{option} {name!r} is not a valid Kubernetes name.{long}",
        why=f"a name has at most {longest} characters here: {rule}.",
        fix=f"give another {option}." if option.startswith("--") else "give --name.",
    )


def _is_label(name: str) -> bool:
    return bool(_LABEL.fullmatch(name)) and len(name) <= _DNS_LABEL


def _secret_key(name: str, reference: str) -> tuple[str, str]:
    secret, _, key = reference.partition("/")
    if not _SUBDOMAIN.fullmatch(secret) or not re.fullmatch(r"[-._a-zA-Z0-9]+", key):
        raise ConfigError(
            f"--secret {name} needs the name of a Secret and its key.",
            why="the value itself must not be in the file.",
            fix=f"give --secret {name}=SECRET/KEY; `kubectl create secret generic SECRET "
            "--from-file=KEY=FILE` makes one.",
        )
    return secret, key


def _escaped(text: str) -> str:
    """For `command` and `value`, where Kubernetes replaces $(NAME)."""
    return text.replace("$(", "$$(")


def _quantity(mib: int) -> str:
    return f"{mib // 1024}Gi" if mib % 1024 == 0 else f"{mib}Mi"
