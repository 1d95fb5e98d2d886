"""Scripts as a person types them: no ``with``, no ``close``, nothing handled.

Each is written to a file and run as it stands."""

from __future__ import annotations

MODEL = """
import os, signal, sys
import torch, datastates
torch.set_num_threads(1)  # the threads of a parent are not there in what it forks
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def train_step():
    x = torch.randn(16, 8)
    loss = (model(x) - x.flip(1)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
"""

LOOP = """
run = datastates.open("runs").track(model=model, optimizer=optimizer)
while run.step < int(sys.argv[1]):
    loss = train_step()
    run.capture(metrics={"loss": loss})
    print(run.step, loss.hex(), flush=True)
"""

ENDINGS = {
    "falls off its end": "",
    "sys.exit": "sys.exit(0)",
    "an error": "raise RuntimeError('a bug of the script')",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM); signal.pause()",
    "SIGHUP": "os.kill(os.getpid(), signal.SIGHUP); signal.pause()",
    "Ctrl-C": "os.kill(os.getpid(), signal.SIGINT); signal.pause()",
}
"""How a script may end in an orderly way: its newest state is there afterwards."""

SCRIPTS = {
    "plain": MODEL + LOOP,
    "in a function": MODEL
    + """
def main():
    run = datastates.open("runs").track(model=model, optimizer=optimizer)
    while run.step < int(sys.argv[1]):
        loss = train_step()
        run.capture(metrics={"loss": loss})
        print(run.step, loss.hex(), flush=True)

main()
import gc; gc.collect()
""",
    "a cell that is run again": MODEL
    + """
for end in (int(sys.argv[1]) - 5, int(sys.argv[1])):
    repo = datastates.open("runs")
    run = repo.track(model=model, optimizer=optimizer)
    while run.step < end:
        loss = train_step()
        run.capture(metrics={"loss": loss})
        print(run.step, loss.hex(), flush=True)
""",
    "killed": MODEL
    + """
run = datastates.open("runs").track(model=model, optimizer=optimizer)
while run.step < int(sys.argv[1]):
    loss = train_step()
    handle = run.capture(metrics={"loss": loss})
    if run.step == int(sys.argv[1]) - 5:
        handle.wait("durable")
    print(run.step, loss.hex(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
    # These ask for the head: what nobody of its process asks for others may see a tenth of a second
    # later.
    "waits when it is done": (
        MODEL + LOOP + "run.head\nprint('done', flush=True)\nsys.stdin.readline()\n"
    ),
    "uploads its folder": MODEL
    + LOOP
    + """
import shutil; shutil.copytree("runs", "upload", ignore=shutil.ignore_patterns(".tmp-*"))
run.head
print("done", flush=True)
sys.stdin.readline()
""",
    "forks": MODEL
    + LOOP
    + """
child = os.fork()
if child == 0:
    signal.alarm(60)
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    train_step()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child did not end by itself"
run.capture(step=run.step, metrics={"loss": loss})
""",
    "forks and tracks in the child": MODEL
    + LOOP
    + """
run.capture(step=run.step, metrics={"loss": loss}).wait("durable")
child = os.fork()
if child == 0:
    signal.alarm(60)
    fork = datastates.open("runs").track(branch="child", start="main", model=model, optimizer=optimizer)
    print("child", fork.step, flush=True)
    train_step()
    fork.capture()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child did not end well"
""",
    "spawns a reader": (
        "import multiprocessing, datastates\n"
        + """
def read(count):
    print("child", len(datastates.open("runs").log("main")) >= count - 1, flush=True)

if __name__ == "__main__":
"""
        + "".join(f"    {line}\n" for line in (MODEL + LOOP).splitlines())
        + """
    run.head
    child = multiprocessing.get_context("spawn").Process(target=read, args=(run.step,))
    child.start()
    child.join()
    assert child.exitcode == 0, "the child did not end well"
"""
    ),
    "loads data with workers": MODEL
    + """
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((1 << 16,), float(index))

run = datastates.open("runs").track(model=model, optimizer=optimizer)
loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2)
for batch in loader:
    loss = train_step()
    run.capture(metrics={"loss": loss})
    print(run.step, loss.hex(), flush=True)
    if run.step == int(sys.argv[1]): break
""",
    "larger than the disk": (
        """
import sys, torch, datastates
torch.manual_seed(0)
model = torch.nn.Linear(1024, 4096)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
run = datastates.open("runs", memory_bytes=MEMORY).track(model=model, optimizer=optimizer, durable_every=EVERY)
while run.step < int(sys.argv[1]):
    loss = model(torch.randn(4, 1024)).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    run.capture(metrics={"loss": loss.item()})
    print(run.step, loss.item().hex(), flush=True)
"""
    ),
}
"""Each takes the step at which it ends, and says each step that it made with its loss."""
