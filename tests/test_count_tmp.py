import sys; sys.path.insert(0,'tests')
import random
import test_shortcuts as T
from test_shortcuts import *
from saccade.scores.recording import recording_cache as rc
from saccade.scores.codegen import program_cache as pc
class O: pass
keep=[]
@pytest.mark.parametrize("n", range(200, 1200))
def test_count(done, monkeypatch, n):
    rnd = random.Random(n)
    def fill(c):
        p = rnd.choice([0, .5, .9, 1])
        m = c.maxsize - rnd.choice([0,1,2,3,4,6,8])
        for i in range(m):
            o=O(); keep.append(o); c.put((i,n),1,[o]);
            if rnd.random()<p: c.get((i,n))
    ready = alibi(torch.tensor([1.0, 2.0]))
    bad = []
    rc._cache.clear(); fill(rc._cache)
    pc.cache.programs.clear(); fill(pc.cache.programs)
    if n % 2: fill(repeats._repeats)
    if n % 4 >=2: fill(shortcuts._shortcuts)
    for fn in (T.biased, ready):
        for i in range(4): scored(operands(), fn)
    done.clear()
    with monkeypatch.context() as without:
        without.setattr(bind, "_bind", None)
        for fn in (T.biased, ready): attention(*operands(), score_mod=fn)
