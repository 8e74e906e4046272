"""Where torch's fused CPU attention differs from attention: empty rows, negative scales, 16-bit types, no queries."""

import subprocess
import sys

import torch
import torch.nn.functional as F

fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def empty_row():
    """The log of a sum of nothing is −inf."""
    q = k = v = torch.ones(1, 1, 2, 8)
    mask = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])
    out, lse = fused(q, k, v, attn_mask=mask)
    print(f"a row that attends nothing: lse {lse[0, 0, 1]:g}, should be -inf; out {out[0, 0, 1, 0]:g}")


def negative_scale():
    """softmax(−s) is as good as softmax(s)."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=-0.5)
    mask = torch.ones(4, 4).tril().log()
    right = (q @ k.mT * -0.5 + mask).softmax(-1) @ v
    wrong = int((~torch.isclose(out, right)).sum())
    print(f"is_causal with a negative scale: {wrong} of {out.numel()} elements wrong, {int(out.isnan().sum())} NaN")


def lse_of_bfloat16():
    """The same values in two types: bfloat16 is widened exactly, so both should give one float32 result."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 512, 64).bfloat16()
    right = torch.logsumexp(q.double() @ k.double().mT / 8, -1)
    for x in (torch.float32, torch.bfloat16):
        _, lse = fused(q.to(x), k.to(x), v.to(x))
        print(f"lse of the same values as {str(x)[6:]:<9} off by {float((lse - right).abs().max()):.1e}")


def sums_of_bfloat16():
    """dk of one key head that several query heads share, in units of bfloat16's rounding, root mean square of rows."""
    torch.manual_seed(0)
    for heads in (1, 8):
        q, dout = torch.randn(2, 1, heads, 512, 64).bfloat16()
        k, v = torch.randn(2, 1, 1, 512, 64).bfloat16()
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        F.scaled_dot_product_attention(*leaves, enable_gqa=True).backward(dout)
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        F.scaled_dot_product_attention(*wide, enable_gqa=True).backward(dout.double())
        error, right = leaves[1].grad - wide[1].grad, wide[1].grad
        units = float((error.norm(dim=-1) / right.norm(dim=-1)).square().mean().sqrt()) * 2**8
        print(
            f"bfloat16 dk, query heads that share a key head: {heads}; off by {units:.2f} units, rounding once by 0.4"
        )


def no_queries():
    """Nothing to do should not be fatal."""
    code = (
        "import torch; q = torch.ones(1, 1, 0, 8); k = torch.ones(1, 1, 4, 8); "
        "print(torch.nn.functional.scaled_dot_product_attention(q, k, k).shape)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    told = run.stdout.strip() if run.returncode == 0 else f"the process ends with signal {-run.returncode}"
    print(f"no queries: {told}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__} on a CPU")
    for show in (empty_row, negative_scale, lse_of_bfloat16, sums_of_bfloat16, no_queries):
        show()
