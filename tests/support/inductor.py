"""What tests of torch.compile's default backend share."""

from __future__ import annotations


def knows_this_processor() -> None:
    """Inductor tries each of a processor's instruction sets by a small library, which takes 20 seconds in a new folder.
    A process that asks before it has a folder of its own uses the libraries of the common one."""
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    valid_vec_isa_list()
