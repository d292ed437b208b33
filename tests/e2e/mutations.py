"""Faults of distributed training as changes of the sound programs in tests/verify_programs.

`python tests/e2e/mutations.py FOLDER` writes all of them to a folder, each as a script of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

PROGRAMS = Path(__file__).resolve().parents[1] / "verify_programs"


class Mutation(NamedTuple):
    """A change that makes a fault in a program.

    Attributes:
        name: The name of the changed script.
        check: The check that must have a finding.
        line: A part of the line that the finding names.
        old: What is replaced; it occurs once in the program.
        new: What stands there instead.
        is_note: Whether the finding is a note: the cause is not proven, or only speed or variance suffers.
    """

    name: str
    check: str
    line: str
    old: str
    new: str
    is_note: bool = False


def read_program(name: str) -> str:
    return (PROGRAMS / f"{name}.py").read_text()


def apply(base: str, mutation: Mutation) -> str:
    """The program with the fault."""
    text = read_program(base)
    assert text.count(mutation.old) == 1, mutation.name
    return text.replace(mutation.old, mutation.new)


MUTATIONS: dict[str, list[Mutation]] = {
    "classifier": [
        Mutation(
            "set_epoch_forgotten",
            "order of passes",
            "for inputs, labels in loader",
            "        sampler.set_epoch(epoch)\n",
            "",
        ),
        Mutation(
            "set_epoch_on_one_rank",
            "order of passes",
            "for inputs, labels in loader",
            '            print("epoch", epoch)\n        sampler.set_epoch(epoch)\n',
            '            print("epoch", epoch)\n            sampler.set_epoch(epoch)\n',
        ),
        Mutation(
            "no_distributed_sampler",
            "shards",
            "for inputs, labels in loader",
            "loader = DataLoader(train, batch_size=10, sampler=sampler)",
            "loader = DataLoader(train, batch_size=10, shuffle=True)",
        ),
        Mutation(
            "sampler_seeds_differ",
            "shards",
            "for inputs, labels in loader",
            "DistributedSampler(train, seed=1)",
            "DistributedSampler(train, seed=1 + rank)",
        ),
        Mutation(
            "subset_and_sampler",
            "shards",
            "for inputs, labels in loader",
            "    sampler = DistributedSampler(train, seed=1)\n",
            "    train = Subset(train, range(rank, 240, world_size))\n"
            "    sampler = DistributedSampler(train, seed=1)\n",
            is_note=True,
        ),
        Mutation(
            "normalised_by_rank",
            "shards",
            "for inputs, labels in loader",
            "    mean, std = x.mean(0), x.std(0)\n",
            "    mean, std = x[rank::world_size].mean(0), x[rank::world_size].std(0)\n",
        ),
        Mutation(
            "class_weights_of_one_rank",
            "step of one process",
            "loss.backward()",
            "torch.bincount(y, minlength=3)",
            "torch.bincount(y[rank::world_size], minlength=3)",
            is_note=True,
        ),
        Mutation(
            "loss_divided_by_world_size",
            "step of one process",
            "loss.backward()",
            "            loss.backward()\n",
            "            loss = loss / world_size\n            loss.backward()\n",
        ),
        Mutation(
            "not_wrapped",
            "weights",
            "optimizer.step()",
            "model = DDP(net)",
            "model = net",
        ),
        Mutation(
            "layer_added_after_wrapping",
            "weights",
            "net.append(",
            "    net.append(nn.Linear(32, 3))\n    model = DDP(net)\n",
            "    model = DDP(net)\n    net.append(nn.Linear(32, 3))\n",
        ),
        Mutation(
            "rate_of_one_rank",
            "weights",
            "optimizer.step()",
            "lr=rate)",
            "lr=rate / (1 + rank))",
        ),
        Mutation(
            "validation_padded",
            "evaluated samples",
            "out = net(x)",
            "    part = Subset(validation, range(rank, len(validation), world_size))\n"
            "    validation_loader = DataLoader(part, batch_size=8)\n",
            "    padded = DistributedSampler(validation, shuffle=False)\n"
            "    validation_loader = DataLoader(validation, batch_size=8, sampler=padded)\n",
        ),
        Mutation(
            "validation_without_the_last",
            "evaluated samples",
            "out = net(x)",
            "DataLoader(part, batch_size=8)",
            "DataLoader(part, batch_size=8, drop_last=world_size > 1)",
        ),
        Mutation(
            "mean_of_means",
            "reported numbers",
            "dist.all_reduce(sums)",
            "    sums = torch.tensor([loss, right, count])\n"
            "    dist.all_reduce(sums)\n"
            "    return (sums[:2] / sums[2]).tolist()\n",
            "    sums = torch.tensor([loss / count, right / count])\n"
            "    dist.all_reduce(sums)\n"
            "    return (sums / dist.get_world_size()).tolist()\n",
        ),
        Mutation(
            "metric_of_one_rank",
            "reported numbers",
            "right += ",
            "    dist.all_reduce(sums)\n",
            "",
            is_note=True,
        ),
        Mutation(
            "collective_under_rank_0",
            "collectives",
            "dist.all_reduce(sums)",
            "    dist.all_reduce(sums)\n",
            "    if dist.get_rank() == 0:\n        dist.all_reduce(sums)\n",
        ),
        Mutation(
            "collectives_in_another_order",
            "collectives",
            "dist.all_reduce(",
            "    dist.all_reduce(sums)\n",
            "    if dist.get_rank() == 0:\n        dist.all_reduce(torch.zeros(1))\n"
            "    dist.all_reduce(sums)\n",
        ),
        Mutation(
            "groups_of_one_rank",
            "process groups",
            "init_process_group",
            'dist.init_process_group("gloo")\n    rank, world_size = dist.get_rank(), dist.get_world_size()',
            'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)\n'
            "    rank, world_size = 0, 1",
        ),
    ],
    "tokens": [
        Mutation(
            "mean_of_micro_batches",
            "step of one process",
            ".backward()",
            'reduction="sum")\n                    (loss * world_size / count).backward()',
            'reduction="mean")\n                    (loss / ACCUMULATE).backward()',
        ),
        Mutation(
            "count_of_one_rank",
            "step of one process",
            ".backward()",
            "            dist.all_reduce(count)\n",
            "            count *= world_size\n",
            is_note=True,
        ),
        Mutation(
            "no_sync_on_the_last",
            "weights",
            "optimizer.step",
            "syncs = i == ACCUMULATE - 1",
            "syncs = i == 0",
        ),
        Mutation(
            "no_sync_around_backward_only",
            "no_sync around backward only",
            ".backward()",
            "                with contextlib.nullcontext() if syncs else model.no_sync():\n"
            "                    logits, labels = model(tokens).flatten(0, 1), labels.flatten()\n",
            "                logits, labels = model(tokens).flatten(0, 1), labels.flatten()\n"
            "                with contextlib.nullcontext() if syncs else model.no_sync():\n",
            is_note=True,
        ),
        Mutation(
            "micro_batches_clipped",
            "step of one process",
            ".backward()",
            "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
            "                nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
            is_note=True,
        ),
        Mutation(
            "schedule_too_short",
            "schedule",
            "schedule.step()",
            "    steps = epochs * (len(loader) // ACCUMULATE)\n",
            "    steps = epochs * (len(loader) // ACCUMULATE) // world_size\n",
        ),
        Mutation(
            "schedule_stepped_by_each_rank",
            "schedule",
            "schedule.step()",
            "            schedule.step()\n",
            "            for _ in range(world_size):\n                schedule.step()\n",
        ),
    ],
    "by_hand": [
        Mutation(
            "one_layer_not_divided",
            "step of one process",
            "dist.all_reduce(p.grad)",
            "        p.grad /= dist.get_world_size()\n",
            "        p.grad /= dist.get_world_size() if len(p) > 1 else 1\n",
        ),
        Mutation(
            "clipped_before_the_reduction",
            "step of one process",
            "loss.backward()",
            "            average_gradients(model)\n"
            "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
            "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "            average_gradients(model)\n",
        ),
        Mutation(
            "penalty_of_each_rank",
            "step of one process",
            "dist.all_reduce(p.grad)",
            "0.002 * penalty",
            "0.002 * world_size * penalty",
            is_note=True,
        ),
        Mutation(
            "average_forgotten",
            "weights",
            "optimizer.step()",
            "            average_gradients(model)\n",
            "",
        ),
        Mutation(
            "part_forgotten",
            "shards",
            "model(x[rows])",
            "order[start : start + batch][rank::world_size]",
            "order[start : start + batch // world_size]",
        ),
        Mutation(
            "batches_shifted",
            "shards",
            "model(x[rows])",
            "        for start in range(0, 264, batch):\n"
            "            rows = order[start : start + batch][rank::world_size]\n",
            "        for start in range(0, 264, batch):\n"
            "            rows = order.roll(-batch * rank)[start : start + batch]\n",
        ),
        Mutation(
            "seeds_of_weights_differ",
            "weights",
            "model(x[rows])",
            "    torch.manual_seed(79)\n",
            "    torch.manual_seed(79 + rank)\n",
        ),
        Mutation(
            "mean_of_mean_errors",
            "reported numbers",
            "(mean / world_size).item()",
            "    sums = torch.tensor([errors.sum(), float(len(errors))])\n"
            "    dist.all_reduce(sums)\n"
            "    return (sums[0] / sums[1]).item()\n",
            "    mean = errors.mean()\n    dist.all_reduce(mean)\n    return (mean / world_size).item()\n",
        ),
        Mutation(
            "sum_divided_by_world_size",
            "reported numbers",
            ".item()",
            "    sums = torch.tensor([errors.sum(), float(len(errors))])\n"
            "    dist.all_reduce(sums)\n"
            "    return (sums[0] / sums[1]).item()\n",
            "    total = errors.sum()\n    dist.all_reduce(total)\n    return (total / world_size).item()\n",
            is_note=True,
        ),
    ],
    "sharded": [
        Mutation(
            "sharded_loss_divided",
            "step of one process",
            "all_reduce(square)",
            "            loss.backward()\n",
            "            (loss / world_size).backward()\n",
            is_note=True,
        ),
        Mutation(
            "model_not_sharded",
            "weights",
            "optimizer.step()",
            "    fully_shard(model)\n",
            "",
        ),
        Mutation(
            "norm_of_one_shard",
            "step of one process",
            "loss.backward()",
            "    dist.all_reduce(square)\n",
            "",
            is_note=True,
        ),
        Mutation(
            "sharded_metric_of_one_rank",
            "reported numbers",
            ".item()",
            "    dist.all_reduce(counts)\n",
            "",
            is_note=True,
        ),
    ],
    "gan": [
        Mutation(
            "equal_noise",
            "random numbers",
            "maker(torch.randn(",
            "torch.manual_seed(seed + dist.get_rank())",
            "torch.manual_seed(seed)",
            is_note=True,
        ),
        Mutation(
            "second_model_not_wrapped",
            "weights",
            "maker_step.step()",
            "    maker = DDP(maker)\n",
            "",
        ),
    ],
    "averaged": [
        Mutation(
            "statistics_drift_apart",
            "buffers",
            "model(x[rank::world_size])",
            "        average_buffers(net)\n",
            "",
        ),
        Mutation(
            "mean_of_weights_on_one_rank",
            "buffers",
            "model(x[rank::world_size])",
            "old.lerp_(new, 0.1)",
            "old.lerp_(new, 0.1 * (rank == 0))",
        ),
        Mutation(
            "clamped_on_one_rank",
            "weights",
            "model(inputs)",
            "                for p in net.parameters():\n",
            "                for p in net.parameters() if rank == 0 else ():\n",
        ),
        Mutation(
            "gathered_rank_by_rank",
            "reported numbers",
            "(counts[0] / counts[1])",
            "    right = model(x[rank::world_size]).argmax(1) == y[rank::world_size]\n"
            "    counts = torch.tensor([right.sum(), len(right)])\n"
            "    dist.all_reduce(counts)\n",
            "    found = model(x[rank::world_size]).argmax(1)\n"
            "    parts = [torch.empty_like(found) for _ in range(world_size)]\n"
            "    dist.all_gather(parts, found)\n"
            "    right = torch.cat(parts) == y\n"
            "    counts = torch.tensor([right.sum(), len(right)])\n",
            is_note=True,
        ),
    ],
    "stream": [
        Mutation(
            "epoch_of_stream_forgotten",
            "order of passes",
            "for x, y in loader",
            "        stream.set_epoch(epoch)\n",
            "",
        ),
        Mutation(
            "rank_of_stream_forgotten",
            "shards",
            "for x, y in loader",
            "        first = self.rank * worker.num_workers + worker.id\n"
            "        for i in order[first :: self.world_size * worker.num_workers].tolist():\n",
            "        for i in order[worker.id :: worker.num_workers].tolist():\n",
        ),
        Mutation(
            "parts_of_stream_overlap",
            "shards",
            "for x, y in loader",
            "        first = self.rank * worker.num_workers + worker.id\n"
            "        for i in order[first :: self.world_size * worker.num_workers].tolist():\n",
            "        share = self.count // self.world_size\n"
            "        part = order[self.rank * (share // 2) :][:share]\n"
            "        for i in part[worker.id :: worker.num_workers].tolist():\n",
            is_note=True,
        ),
        Mutation(
            "order_of_stream_of_one_rank",
            "shards",
            "for x, y in loader",
            "manual_seed(self.epoch))\n        worker",
            "manual_seed(self.epoch + self.rank))\n        worker",
            is_note=True,
        ),
    ],
    "scaler": [
        Mutation(
            "clipped_before_unscaling",
            "clipping before unscaling",
            "clip_grad_norm_",
            "            scaler.unscale_(optimizer)\n",
            "",
        ),
        Mutation(
            "clipped_on_rank_0",
            "weights",
            "clip_grad_norm_",
            "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
            "            if rank == 0:\n"
            "                nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        ),
        Mutation(
            "skipped_on_one_rank",
            "weights",
            "scaler.unscale_(optimizer)",
            "            dist.all_reduce(level)\n",
            "            level *= world_size\n",
        ),
        Mutation(
            "stepped_without_scaler",
            "weights",
            "scaler.step(optimizer)",
            "            scaler.unscale_(optimizer)\n"
            "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "            scaler.step(optimizer)\n"
            "            scaler.update()\n",
            "            if rank == 0:\n"
            "                scaler.step(optimizer)\n"
            "                scaler.update()\n"
            "            else:\n"
            "                optimizer.step()\n",
        ),
        Mutation(
            "one_cycle_too_long",
            "schedule",
            "schedule.step()",
            "total_steps=epochs * len(loader))",
            "total_steps=epochs * len(data) // 10)",
            is_note=True,
        ),
    ],
    "augmented": [
        Mutation(
            "seed_of_workers_constant",
            "random numbers",
            "for x, y in loader",
            "    seed = torch.initial_seed() % 2**32\n",
            "    seed = 42\n",
            is_note=True,
        ),
        Mutation(
            "equal_seeds_of_ranks",
            "random numbers",
            "for x, y in loader",
            "torch.manual_seed(seed + dist.get_rank())",
            "torch.manual_seed(seed)",
            is_note=True,
        ),
        Mutation(
            "splits_differ",
            "shards",
            "for x, y in loader",
            "[240, 40], generator=split)",
            "[240, 40])",
        ),
    ],
    "plateau": [
        Mutation(
            "plateau_of_one_rank",
            "schedule",
            "schedule.step(loss)",
            "        dist.all_reduce(sums)\n        return (sums[0] / sums[1]).item()\n",
            "        own = (sums[0] / sums[1]).item()\n        dist.all_reduce(sums)\n        return own\n",
            is_note=True,  # no rank has lowered its rate yet
        ),
        Mutation(
            "sums_reduced_again",
            "reported numbers",
            "sums[0] / sums[1]",
            "        sums = self.own.clone()\n",
            "        sums = self.own\n",
            is_note=True,
        ),
        Mutation(
            "perplexities_averaged",
            "reported numbers",
            "mean.item()",
            "        sums = self.own.clone()\n"
            "        dist.all_reduce(sums)\n"
            "        return (sums[0] / sums[1]).item()\n",
            "        mean = (self.own[0] / self.own[1]).exp() / dist.get_world_size()\n"
            "        dist.all_reduce(mean)\n"
            "        return mean.item()\n",
            is_note=True,
        ),
        Mutation(
            "same_device",
            "devices",
            "model",
            'int(os.environ["LOCAL_RANK"])\n    if',
            "0\n    if",
        ),
    ],
    "resumed": [
        Mutation(
            "weights_loaded_on_rank_0",
            "weights",
            "load_state_dict",
            '    net.load_state_dict(saved["model"])\n',
            '    if rank == 0:\n        net.load_state_dict(saved["model"])\n',
        ),
        Mutation(
            "optimizer_loaded_on_rank_0",
            "weights",
            "optimizer.load_state_dict(",
            '    optimizer.load_state_dict(saved["optimizer"])\n',
            '    if rank == 0:\n        optimizer.load_state_dict(saved["optimizer"])\n',
        ),
        Mutation(
            "random_state_of_rank_0",
            "random numbers",
            "model(x)",
            'saved["rng"][rank]',
            'saved["rng"][0]',
            is_note=True,
        ),
        Mutation(
            "file_of_all_ranks",
            "files",
            "torch.save(",
            "    if dist.get_rank() == 0:\n        saved = {",
            "    if True:\n        saved = {",
            is_note=True,
        ),
        Mutation(
            "read_before_it_is_written",
            "files",
            "torch.load(",
            "        torch.save(saved, PATH)\n    dist.barrier()\n",
            "        torch.save(saved, PATH)\n    __import__('time').sleep(0.5)\n",
            is_note=True,
        ),
        Mutation(
            "barrier_under_rank_0",
            "collectives",
            "dist.barrier()",
            "    dist.barrier()\n    if rank == 0:\n        os.remove",
            "    if rank == 0:\n        dist.barrier()\n        os.remove",
        ),
        Mutation(
            "position_of_one_rank",
            "shards",
            "for number, (x, y) in enumerate(loader)",
            "order[self.start :][rank::world_size]",
            "order[rank::world_size][self.start :]",
            is_note=True,
        ),
    ],
    "gathered": [
        Mutation(
            "surplus_kept",
            "evaluated samples",
            "model(x)",
            ".flatten()[:size]",
            ".flatten()",
        ),
        Mutation(
            "evaluated_through_ddp_on_rank_0",
            "collectives",
            ".backward()",
            '        if rank == 0:\n            print(f"epoch',
            '        if rank == 0:\n            model(x[:8])\n            print(f"epoch',
        ),
    ],
    "contrastive": [
        Mutation(
            "offset_forgotten",
            "step of one process",
            "all_reduce(gradient)",
            " + dist.get_rank() * len(first)\n",
            "\n",
            is_note=True,
        ),
        Mutation(
            "parameter_beside_the_model",
            "step of one process",
            ".backward()",
            "            average(scale.grad)\n",
            "",
            is_note=True,
        ),
    ],
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for base, mutations in MUTATIONS.items():
        (folder / f"{base}.py").write_text(read_program(base))
        for mutation in mutations:
            (folder / f"{mutation.name}.py").write_text(apply(base, mutation))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
