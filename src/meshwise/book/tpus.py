"""Chapter "How to Think About TPUs"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwise.book.problems import Derivation, Method, by_rule
from meshwise.hardware import Torus, parse_cluster


def wraps(values: Mapping[str, Any]) -> Derivation:
    """Which axes of a slice are rings by the rules of its generation: all, none, or `the axis of 16`."""
    name = f"{values['gen']}:{'x'.join(map(str, values['shape']))}"
    network = parse_cluster(name).network
    assert isinstance(network, Torus)
    rings = [axis.size for axis in network.axes if axis.wraps]
    every = len(rings) == len(values["shape"])
    found = "all" if every else "none" if not rings else f"the axis of {', '.join(map(str, rings))}"
    rule = "axes that close: 16 chips on v5e and v6e, multiples of 4 of a full cube on v4 and v5p"
    return Derivation(found, rule, name, ("clusters", name))


_ONE_WAY = "V = prod(array)*bytes; "
_HOPS = "(abs(dst[0] - src[0]) + abs(dst[1] - src[1])) * hop_latency_us*1e-6"
_STAGES = (
    "pcie = array_bytes_book/chips/W_pcie; ici = array_bytes_book*(chips - 1)/chips/(2*W_ici_uni); "
    "hbm = array_bytes_book/W_hbm; math = 2*vec*n*n/C_bf16; "
)
_VPU = "sublanes*lanes*alus*clock"
_INT8 = "D*F / (2*D*F*W/C_int8 - (D + F))"

METHODS: Mapping[str, Method] = {
    "mxu.per_mxu": "2*rows*k*n/cycles * clock",
    "mxu.v5e_chip": "mxus * 2*rows*k*n/cycles * clock",
    "mxu.v6e_ratio": "(new/old)**2",
    "mxu.alus": "n**2",
    "mxu.v5p_macs": "C_bf16 / 2",
    "torus.maxdist": "floor(n/2)",
    "spec_*.hbm_*": "listed",
    "spec_*.int8": "bf16 * int8_speedup",
    "spec_*.ici_bidi": "2*uni",
    "spec_*.pod_chips": "prod(pod)",
    "spec_tpu7x.pod_first_printed": "pod_now_chips",
    "spec_*.ici_ridge": by_rule("fsdp", C="C_bf16", W="W_ici_bidi", axes="axes"),
    "spec.pcie": "listed",
    "spec.dcn*": "host_gbit*1e9/8 / chips_per_host",
    "text.v5p_chip": "C_table",
    "text.v5p_pod": "chips*C_bf16",
    "text.hbm_over_ici.feb25": "W_hbm / W_ici",
    "vmem.min_intensity": "C_bf16 / (vmem_over_hbm*W_hbm)",
    "pcie.ratio": "W_hbm / W_pcie",
    "wrap.*": wraps,
    "q1.bytes_per_chip": "params*bytes / chips",
    "q1.load_time": "params*bytes/chips / W_hbm",
    "q2.*_hosts": "prod(pod) / prod(host)",
    "q2.*_cores": "prod(pod) * cores_per_chip",
    "q2.*_flops*": "prod(pod) * C_bf16",
    "q2.*_hbm": "prod(pod) * HBM",
    "q3.Bcrit*": by_rule("critical-batch", C="C_bf16", W_hbm="W_pcie"),
    "q4.ops_per_row": "2*D*F",
    "q4.bytes_fixed": "D*F",
    "q4.bytes_per_row": "D + F",
    "q4.Bcrit_hbm*": f"W = W_hbm; {_INT8}",
    "q4.vmem_bw": "ratio*W_hbm",
    "q4.Bcrit_vmem": f"W = ratio*W_hbm; {_INT8}",
    "q4.time_*": by_rule("matmul-time", C="C_int8", b=1, w=1),
    "q5.first_byte": _HOPS,
    "q5.bytes": "prod(array)*bytes",
    "q5.ports": "len(shape)",
    "q5.bw_time": f"{_ONE_WAY}V / (2*W_ici_uni)",
    "q5.total*": _ONE_WAY + by_rule("send", bytes="V", hops=1, hop=_HOPS, links=2, W_link="W_ici_uni"),
    "q6.array": "n*n*elem_bytes",
    "q6.option": "'PCIe then ICI' if chips*W_pcie > W_dcn_host else 'DCN then PCIe'",
    "q6.pcie*": by_rule("host-transfer", bytes="array_bytes_book", chips="chips", W_host="W_pcie"),
    "q6.ici": "array_bytes_book*(chips - 1)/chips / (2*W_ici_uni)",
    "q6.hbm": "array_bytes_book / W_hbm",
    "q6.flops": "2*vec*n*n",
    "q6.math": "2*vec*n*n / C_bf16",
    "q6.total": by_rule(
        "pipelined-transfer",
        bytes="array_bytes_book",
        W_host="W_pcie",
        W_link="W_ici_uni",
        flops="2*vec*n*n",
        C="C_bf16",
    ),
    "q6.bottleneck": f"{_STAGES}'ICI' if ici > max(pcie, hbm, math) else 'PCIe' if pcie > max(hbm, math) else 'HBM'",
    "q6.total_exact_bytes": "n*n*elem_bytes*(chips - 1)/chips / (2*W_ici_uni)",
    "vpu.throughput*": _VPU,
    "vpu.ratio": f"mxu_per_core / ({_VPU})",
    "vpu.vreg": "regs*sublanes*lanes*bytes",
    "vpu.alus": "sublanes*lanes*alus",
}
