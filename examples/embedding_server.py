"""Train embeddings of users and items on a parameter server. Start each process in its own shell:

    python examples/embedding_server.py server
    python examples/embedding_server.py worker --seed 1
    python examples/embedding_server.py worker --seed 2

Kill a worker, or start another one, at any time. The server evaluates when all workers have left, and writes
runs/embeddings/model.pt. The data are pairs of a user and an item, drawn by each worker.
"""

import argparse

import torch
import torch.nn.functional as F

import paceline

USERS, ITEMS, WIDTH = 2000, 500, 16
BATCH = 256


def make_tables() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "users": torch.randn(USERS, WIDTH, generator=generator) / WIDTH**0.5,
        "items": torch.randn(ITEMS, WIDTH, generator=generator) / WIDTH**0.5,
    }


def draw_pairs(size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """A user likes an item if the product of two hidden vectors is positive."""
    hidden = torch.Generator().manual_seed(7)
    tastes = torch.randn(USERS, 4, generator=hidden)
    traits = torch.randn(ITEMS, 4, generator=hidden)
    users = torch.randint(USERS, (size,), generator=generator)
    items = torch.randint(ITEMS, (size,), generator=generator)
    return users, items, ((tastes[users] * traits[items]).sum(1) > 0).float()


def evaluate(client: paceline.ServerClient) -> float:
    tables = client.snapshot()["parameters"]  # all tables at one version
    users, items, likes = draw_pairs(20_000, torch.Generator().manual_seed(1000))
    scores = (tables["users"][users] * tables["items"][items]).sum(1)
    return ((scores > 0) == (likes > 0)).float().mean().item()


def serve(file: str, workers: int) -> None:
    server = paceline.ParameterServer(
        make_tables(), lambda p: torch.optim.Adagrad(p, lr=0.5), file, max_staleness=4
    )
    with server:
        print(f"listening on {server.address}", flush=True)
        server.wait(workers)
        with paceline.connect_server(file) as client:
            version = client.save("runs/embeddings/model.pt")
            print(f"accuracy {100 * evaluate(client):.1f} % after {version} pushes")


def work(file: str, seed: int, pushes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with paceline.connect_server(file, clip_norm=1.0) as client:
        while client.version < pushes:  # counted over all workers
            users, items, likes = draw_pairs(BATCH, generator)
            scores = (client.pull("users", users) * client.pull("items", items)).sum(1)
            F.binary_cross_entropy_with_logits(scores, likes).backward()
            client.push()
        print(
            f"pulled {client.bytes_pulled / 2**20:.1f} MiB, pushed {client.bytes_pushed / 2**20:.1f} MiB"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("role", choices=["server", "worker"])
    options.add_argument("--file", default="runs/embeddings/server.json")
    options.add_argument("--workers", type=int, default=2, help="how many the server waits for")
    options.add_argument("--pushes", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    if args.role == "server":
        serve(args.file, args.workers)
    else:
        work(args.file, args.seed, args.pushes)


if __name__ == "__main__":
    main()
