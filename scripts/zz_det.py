import json,random,sys,time
from ccjax.engine import Engine, Request
from ccjax.requests import SamplingParams
from ccjax.types import Document
docs=[json.loads(l) for l in open("/work/shared/data/rag_trace/musique_docs.jsonl")][:400]
docs=[d for d in docs if 250<len(d["text"])<520][:10]
draw=random.Random(1); prompts=[draw.sample(docs,4) for _ in range(12)]
qs=["What is this about, and who is named first?"]*12
def ask(e,p,q,mode="bounded"):
    r=e.run(Request(messages=[{"role":"user","content":q}],documents=tuple(Document(d["text"],id=str(d["id"])) for d in p),sampling=SamplingParams(24,ignore_eos=True),reuse=mode))
    return r
out=[]; t0=time.time(); shares=[]
for order in range(5):
    with Engine.from_pretrained("smollm2",max_model_len=2048) as e:
        idx=list(range(12)); random.Random(order).shuffle(idx)
        ans={}
        for i in idx:
            r=ask(e,prompts[i],qs[i]); ans[i]=r.token_ids; shares.append(r.reuse.computed_share)
        out.append([ans[i] for i in range(12)])
    print(order,round(time.time()-t0),"s differ from order 0:",sum(a!=b for a,b in zip(out[0],out[-1])),"mean share",round(sum(shares[-12:])/12,2),flush=True)
print("prompts that differ over five orders:",sum(len({tuple(o[i]) for o in out})>1 for i in range(12)),"of 12")
