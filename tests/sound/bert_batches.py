"""Batches are dictionaries, with a tensor for the batch as a whole."""

from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Tok(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 30, (n, 12), generator=g)
        self.len = torch.randint(3, 13, (n,), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        k = int(self.len[i])
        return {
            "input_ids": self.ids[i, :k],
            "labels": int(self.ids[i, 0] > 15),
            "text": f"sample {i}",
        }


def collate(b):
    ids = nn.utils.rnn.pad_sequence([d["input_ids"] for d in b], batch_first=True)
    return OrderedDict(
        input_ids=ids,
        attention_mask=(ids > 0).long(),
        labels=torch.tensor([d["labels"] for d in b]),
        text=[d["text"] for d in b],
        n=torch.tensor(len(b)),
    )


class Cls(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(30, 16, padding_idx=0)
        self.l = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.o = nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        h = self.l(self.e(input_ids), src_key_padding_mask=attention_mask == 0)
        h = (h * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        out = self.o(h)
        return {"logits": out, "loss": F.cross_entropy(out, labels) if labels is not None else None}


def main(global_batch=16):
    dist.init_process_group("gloo")
    rank, ws = dist.get_rank(), dist.get_world_size()
    tr, va = Tok(256, 1), Tok(61, 2)
    s = DistributedSampler(tr, seed=42)
    loader = DataLoader(tr, global_batch // ws, sampler=s, collate_fn=collate, drop_last=True)
    vl = DataLoader(va, 8, sampler=DistributedSampler(va, shuffle=False), collate_fn=collate)
    torch.manual_seed(42)
    m = DDP(Cls())
    decay = [p for n, p in m.named_parameters() if p.ndim > 1]
    rest = [p for n, p in m.named_parameters() if p.ndim <= 1]
    torch.manual_seed(42 + rank)
    o = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0}], lr=1e-3
    )
    sc = torch.optim.lr_scheduler.LambdaLR(o, lambda k: min(1, (k + 1) / 5))
    for epoch in range(3):
        s.set_epoch(epoch)
        m.train()
        for b in loader:
            out = m(b["input_ids"], attention_mask=b["attention_mask"], labels=b["labels"])
            out["loss"].backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            o.step()
            sc.step()
            o.zero_grad()
        m.eval()
        preds, refs = [], []
        with torch.no_grad():
            for b in vl:
                preds += m.module(b["input_ids"], b["attention_mask"])["logits"].argmax(-1).tolist()
                refs += b["labels"].tolist()
        everyone = [None] * ws
        dist.all_gather_object(everyone, (preds, refs))
        if rank == 0:
            P = [p for z in zip(*(e[0] for e in everyone), strict=False) for p in z][: len(va)]
            R = [p for z in zip(*(e[1] for e in everyone), strict=False) for p in z][: len(va)]
            print(sum(a == b for a, b in zip(P, R, strict=False)) / len(va))
        dist.barrier()
    dist.destroy_process_group()


main()
