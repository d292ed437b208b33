"""The models of the watched script: names of parameters, and which of them DDP does not reduce."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.audit.digests import digest
from paceline.audit.events import ModelSeen, NotReduced, full_name
from paceline.audit.record import Recorder, user_line
from paceline.parallel.modules import unwrap


class Models:
    """The models that were called, numbered in the order of their first call in training, from 0.

    Models without DDP that are first called outside of training get the numbers -1, -2 and so on: a rank may
    call such a model alone, and the numbers of the others must not depend on it.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._roots: dict[int, tuple[int, torch.nn.Module]] = {}
        self._names: dict[int, str] = {}
        # Parameters that no called model has. A script may make new ones for each batch, so weak references.
        self._outside: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()
        self._shapes: Counter[str] = Counter()
        self._trained: set[int] = set()  # parameters of models that were called in training
        self._added: dict[int, str] = {}
        # Parameters that DDP reduces, and those that it is told to ignore: the script reduces these itself.
        self._reduced: dict[int, torch.nn.Parameter] = {}
        self._reported: dict[int, torch.nn.Parameter] = {}
        self._present_at_wrap: set[int] = set()
        self.ddp: list[DistributedDataParallel] = []
        torch_module.register_module_parameter_registration_hook(self._on_added)
        torch_module.register_module_module_registration_hook(self._on_added)

    def on_call(self, root: torch.nn.Module, *, trains: bool) -> int:
        """Note a call of a model, and return the number of the model: a new one at its first call."""
        inner = inner_of(root)
        if id(inner) not in self._roots:
            untrained = not trains and not any(inner_of(model) is inner for model in self.ddp)
            others = sum((n < 0) == untrained for n, _ in self._roots.values())
            self._roots[id(inner)] = (-1 - others if untrained else others, inner)
            self._record_model(self._roots[id(inner)][0], inner)
        number = self._roots[id(inner)][0]
        if trains:
            self._trained.update(id(parameter) for parameter in inner.parameters())
        return number

    def restart(self) -> None:
        """Number the models anew."""
        self._roots.clear()
        self._names.clear()
        self._trained.clear()

    def is_trained(self, root: torch.nn.Module) -> bool:
        """Whether a model, or one that it is a part of, has been called in training, or is wrapped in DDP."""
        inner = inner_of(root)
        is_first_in_training = self._roots[id(inner)][0] >= 0
        return is_first_in_training or any(id(p) in self._trained for p in inner.parameters())

    def by_number(self) -> dict[int, torch.nn.Module]:
        """Every model by its number, unwrapped."""
        return dict(self._roots.values())

    def name_of(self, parameter: torch.Tensor) -> str:
        """The full name of a parameter of any model; the shape and a number if no called model has it."""
        if self.has(parameter):
            return self._names[id(parameter)]
        if parameter not in self._outside:
            shape = f"a parameter of shape {list(parameter.shape)}"
            number = self._shapes[shape] = self._shapes[shape] + 1
            self._outside[parameter] = shape if number == 1 else f"{shape} ({number})"
        return self._outside[parameter]

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether a model that was called has this parameter."""
        if id(parameter) not in self._names:
            for number, inner in self._roots.values():
                for name, each in without_ddp(inner, inner.named_parameters()):
                    self._names[id(each)] = full_name(number, name)
        return id(parameter) in self._names

    def add_ddp(self, model: DistributedDataParallel) -> None:
        """Add a model that was wrapped in DDP: it reduces the gradients from now on."""
        self.ddp.append(model)
        ignored = set(model.parameters_to_ignore)
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad or name in ignored:
                self._reduced[id(parameter)] = parameter
            self._present_at_wrap.add(id(parameter))

    def is_reduced(self, module: torch.nn.Module) -> bool:
        """Whether DDP, or the script in its place, reduces the gradient of a parameter of this module."""
        return any(id(parameter) in self._reduced for parameter in module.parameters())

    def report_unreduced(self, trained: Iterable[torch.Tensor], steps_done: int) -> None:
        """Record those of the trained parameters that belong to a DDP and that nobody reduces."""
        inside = {id(p): p for model in self.ddp for p in unwrap(model).parameters()}
        for key in map(id, trained):
            if key in inside and key not in self._reduced and key not in self._reported:
                self._reported[key] = inside[key]
                self._recorder.write(
                    NotReduced(
                        name=self.name_of(inside[key]),
                        at=self._added.get(key, "") or user_line(),
                        steps_done=steps_done,
                        frozen=key in self._present_at_wrap,
                    )
                )

    def _record_model(self, number: int, inner: torch.nn.Module) -> None:
        meshes = [p.device_mesh for p in inner.parameters() if isinstance(p, DTensor)]
        is_fsdp = any(isinstance(m, FSDPModule) for m in inner.modules())
        is_data = is_fsdp and all(mesh.ndim == 1 for mesh in meshes)
        layout = ("data" if is_data else "parts") if meshes else ""
        wrapped = [m for m in inner.modules() if isinstance(m, DistributedDataParallel)]
        inside = {id(p) for wrapper in wrapped for p in wrapper.parameters()}
        outside = [
            full_name(number, name)
            for name, p in without_ddp(inner, inner.named_parameters())
            if wrapped and id(p) not in inside
        ]
        self._recorder.write(ModelSeen(layout=layout, outside_ddp=outside))

    def _on_added(self, module: torch.nn.Module, name: str, added: Any) -> None:
        """Remember the line that adds a parameter or a module after DDP was built."""
        if self.ddp and added is not None:
            is_module = isinstance(added, torch.nn.Module)
            for parameter in added.parameters() if is_module else [added]:
                self._added[id(parameter)] = user_line()


def inner_of(root: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP, `torch.compile` and wrappers that call it `module`, such as Fabric's."""
    inner = unwrap(root)
    held = getattr(inner, "module", None)
    if isinstance(held, torch.nn.Module):
        own, of_held = ({id(p) for p in module.parameters()} for module in (inner, held))
        if own == of_held:
            return inner_of(held)
    return inner


def ddp_of(root: torch.nn.Module) -> DistributedDataParallel | None:
    """The first DDP in a module, which may be the module itself; None if there is none."""
    return next((m for m in root.modules() if isinstance(m, DistributedDataParallel)), None)


def without_ddp(
    model: torch.nn.Module, named: Iterable[tuple[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """These entries of a model, under the names that they have if no module in it is wrapped in DDP.

    A script may wrap a part of its model only if there are several ranks.
    """
    wrappers = [n for n, m in model.named_modules() if n and isinstance(m, DistributedDataParallel)]
    for name, value in named:
        for wrapper in wrappers:
            inside = name.removeprefix(f"{wrapper}.module.")
            name = name if inside == name else f"{wrapper}.{inside}"
        yield name, value


def state_by_name(model: torch.nn.Module) -> dict[str, Any]:
    """The entries of the state dict of a model, under the names that they have without DDP."""
    return dict(without_ddp(model, (model.state_dict() or {}).items()))


def parameter_digests(model: torch.nn.Module) -> dict[str, int]:
    """The digest of each parameter, by name; without shards, which are a rank's own."""
    return {
        name: digest(p)
        for name, p in without_ddp(model, model.named_parameters())
        if not is_lazy(p) and not isinstance(p, DTensor)
    }


def buffer_digests(model: torch.nn.Module) -> dict[str, int]:
    """The digest of each floating-point buffer that is saved with the model, by name."""
    buffers = {
        name: b
        for name, b in without_ddp(model, model.named_buffers())
        if not is_lazy(b) and b.is_floating_point()
    }
    saved = state_by_name(model) if buffers else {}  # others are a rank's own
    return {name: digest(buffer) for name, buffer in buffers.items() if name in saved}
