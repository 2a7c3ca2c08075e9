"""The compile gate: every shipped tile config compiles for Hopper on a machine without a GPU, and fits.

    python -m tests.gate [gluon | triton] [configs | features | combinations] [read]

Triton compiles without a GPU, and ptxas, which comes with it, reports registers, spills and warnings. A kernel is
fit to ship if ptxas warns of nothing, if it spills no more than its config row says, with the reason, if its shared
memory is within what Hopper gives one program, if no mbarrier shares its place with anything else, and if no
instruction changes a uniform register that none has written. `read` stops where Triton has read a kernel, which takes a
tenth of the time: whether this Triton takes what another one does.
"""
