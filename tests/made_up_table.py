"""A table of runs that nobody made: tensor parallelism, a framework's own switch, out of memory, failures, odd devices."""

from __future__ import annotations

from pathlib import Path

HEADER = (
    "dataset,group,model,params_b,gpu,num_gpus,nodes,seq_len,gbs,dp,tp,pp,mbs,gas,zero,recompute,extra,status,"
    "step_time_s,samples_per_s,mem_gb,trial_cost_s"
)
MIXED = [
    "odd,mixed,nobody-knows,0.3,V100+T4,4,1,512,16,4,1,1,1,4,0,none,fuse=0;section=A,ok,0.8,,9,40",
    "odd,mixed,nobody-knows,0.3,V100+T4,4,1,512,16,4,1,1,2,2,0,none,fuse=0;section=A,ok,0.5,,14,36",
    "odd,mixed,nobody-knows,0.3,V100+T4,4,1,512,16,4,1,1,4,1,0,none,fuse=0;section=A,oom,,,,70",
    "odd,mixed,nobody-knows,0.3,V100+T4,4,1,512,16,2,2,1,4,2,1,full,fuse=1;section=B,ok,,40,12,",
    "odd,mixed,nobody-knows,0.3,V100+T4,4,1,512,16,2,2,1,8,1,1,full,fuse=1;section=B,fail,,,,",
    "odd,mixed,nobody-knows,0.3,V100+T4,4,1,512,16,2,1,2,2,4,0,none,fuse=1;section=B,ok,0.45,,10,",
    "odd,mixed,nobody-knows,0.3,V100+T4,4,1,512,16,3,1,1,2,4,0,none,fuse=1;section=B,ok,0.1,,10,",
]
"""Six configs of four ranks, and one that does not fit the ranks; the best is the second with tensor parallelism, 40 samples/s."""
BEST = "z1_tp2_gas2_mbs4_rc_fuse-1"
KNOWN = [
    f"odd,known,small,0.35,H100-80GB,8,1,2048,64,8,1,1,{micro},{64 // 8 // micro},1,none,,{status},{step},,{memory},"
    for micro, status, step, memory in ((1, "ok", 1.2, 10), (2, "ok", 1.0, 14), (4, "ok", 0.9, 22), (8, "ok", 0.85, 38))
]
"""Four configs without tensor parallelism or switches, of a model whose shape is known; the largest micro-batch is best."""
SHAPES = """model,layers,hidden,heads,ffn,gated_mlp,vocab,causal,flash_attention,fused_kernels,activation_dtype_bytes,grad_dtype_bytes
Small,24,1024,16,4096,0,51200,1,1,1,2,4
"""


def write_table(folder: Path, *groups: list[str], shapes: str = SHAPES) -> Path:
    """runs.csv with these groups, or both, and models.csv beside it."""
    lines = [HEADER, *(line for group in groups or (MIXED, KNOWN) for line in group)]
    (folder / "models.csv").write_text(shapes, encoding="utf-8")
    file = folder / "runs.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
