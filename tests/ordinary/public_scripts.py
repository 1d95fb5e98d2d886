"""Six well-known public training scripts, written from their descriptions at a tiny size, and made
restartable with a few lines.

Each runs as ``python FILE``, and prints a line with the loss of each step before it captures that
step.
"""

from __future__ import annotations

MNIST = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
import datastates

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(8 * 5 * 5, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        x = self.fc2(self.dropout2(F.relu(self.fc1(x))))
        return F.log_softmax(x, dim=1)

def train(model, loader, optimizer, run):
    model.train()
    for batch_idx, (data, target) in run.enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        print("train", run.step, batch_idx, loss.item().hex(), flush=True)
        run.capture(metrics={"loss": loss.item()}).wait("durable")

def test(model, loader, epoch):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    print("test", epoch, loss.hex(), correct, flush=True)

def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    images = torch.randn(112, 1, 14, 14, generator=torch.Generator().manual_seed(5))
    labels = images.flatten(1)[:, :10].argmax(dim=1)
    train_loader = DataLoader(TensorDataset(images[:80], labels[:80]), batch_size=8, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[80:], labels[80:]), batch_size=16)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    run = datastates.open("runs").track(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(3):
        train(model, train_loader, optimizer, run)
        test(model, test_loader, epoch)
        scheduler.step()

main()
"""

IMAGENET = """
import torch, torch.nn as nn
from torch.utils.data import DataLoader, Dataset
import datastates

class Images(Dataset):
    def __init__(self, count, is_training):
        generator = torch.Generator().manual_seed(count)
        self.images = torch.randn(count, 3, 12, 12, generator=generator)
        self.is_training = is_training

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, top, left = self.images[index], 2, 2
        if self.is_training:  # a random crop and a random flip, in the workers
            top, left = torch.randint(5, (2,)).tolist()
            if torch.rand(()) < 0.5:
                image = image.flip(2)
        return image[:, top : top + 8, left : left + 8], index % 4

class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()

class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = 0.0
        self.count = 0

    def update(self, val, n=1):
        self.val, self.sum, self.count = val, self.sum + val * n, self.count + n
        self.avg = self.sum / self.count

def train(loader, model, criterion, optimizer, epoch, losses, run):
    model.train()
    for i, (images, target) in run.enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("train", run.step, i, losses.avg.hex(), loss.item().hex(), flush=True)
        run.capture(metrics={"loss": loss.item()}).wait("durable")
    print("epoch", epoch, losses.avg.hex(), flush=True)
    losses.reset()

def validate(loader, model, criterion, epoch):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(output.argmax(1).eq(target).float().mean().item() * 100, images.size(0))
    print("validate", epoch, losses.avg.hex(), top1.avg.hex(), flush=True)
    return top1.avg

def adjust_learning_rate(optimizer, epoch):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * (0.1 ** (epoch // 2))

def main():
    torch.set_num_threads(1)
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Block(8), Block(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    train_loader = DataLoader(Images(72, True), batch_size=8, shuffle=True, num_workers=2)
    val_loader = DataLoader(Images(32, False), batch_size=16)
    losses = AverageMeter()
    run = datastates.open("runs").track(
        model=model, optimizer=optimizer, losses=vars(losses), best_acc1=0.0
    )
    for epoch in run.epochs(3):
        adjust_learning_rate(optimizer, epoch)
        train(train_loader, model, criterion, optimizer, epoch, losses, run)
        acc1 = validate(val_loader, model, criterion, epoch)
        run.values["best_acc1"] = max(acc1, run.values["best_acc1"])
        print("best", epoch, run.values["best_acc1"].hex(), flush=True)

main()
"""

DCGAN = """
import sys
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
import datastates

torch.set_num_threads(1)
torch.manual_seed(int(sys.argv[1]))  # the public script draws this number at random
nz = 6
netG = nn.Sequential(
    nn.ConvTranspose2d(nz, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(8, 1, 4, bias=False), nn.Sigmoid(), nn.Flatten(0),
)

def weights_init(m):
    if "Conv" in type(m).__name__:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif "BatchNorm" in type(m).__name__:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)

netG.apply(weights_init)
netD.apply(weights_init)
images = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(6)).tanh()
dataloader = DataLoader(TensorDataset(images), batch_size=6, shuffle=True)
criterion = nn.BCELoss()
fixed_noise = torch.randn(4, nz, 1, 1)
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
run = datastates.open("runs").track(
    netG=netG, netD=netD, optimizerG=optimizerG, optimizerD=optimizerD, fixed_noise=fixed_noise
)
for epoch in run.epochs(4):
    for (real,) in run.steps(dataloader):
        # the discriminator: log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        fake = netG(torch.randn(real.size(0), nz, 1, 1))
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()
        # the generator: log(D(G(z)))
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        errD = errD_real.item() + errD_fake.item()
        print("train", run.step, errD.hex(), errG.item().hex(), flush=True)
        run.capture(metrics={"errD": errD, "errG": errG.item()}).wait("durable")
    print("samples", epoch, netG(fixed_noise).detach().double().sum().item().hex(), flush=True)
"""

NANOGPT = """
import math, os
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
import datastates

batch_size, block_size, vocab_size = 4, 16, 32
max_iters, warmup_iters, eval_interval, eval_iters, gradient_accumulation_steps = 30, 5, 8, 2, 2
learning_rate, min_lr, grad_clip = 1e-2, 1e-3, 1.0
torch.set_num_threads(1)
torch.manual_seed(1337)
for split, count in (("train", 4000), ("val", 400)):
    if not os.path.exists(split + ".bin"):
        np.random.default_rng(count).integers(0, vocab_size, count).astype(np.uint16).tofile(split + ".bin")

def get_batch(split):
    data = np.memmap(split + ".bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(vocab_size, 16), nn.Embedding(block_size, 16), nn.Dropout(0.1)
        self.qkv, self.proj, self.ln_1, self.ln_2 = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.lm_head = nn.Linear(16, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # tied

    def forward(self, idx, targets):
        x = self.drop(self.wte(idx) + self.wpe.weight)
        q, k, v = (part.view(len(x), -1, 2, 8).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(16, dim=2))
        dropout_p = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(x.shape)))
        logits = self.lm_head(x + self.mlp(self.ln_2(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        out[split] = sum(model(*get_batch(split)).item() for _ in range(eval_iters)) / eval_iters
    model.train()
    return out

def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
    return min_lr + coeff * (learning_rate - min_lr)

model = GPT()
decay, rest = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=learning_rate, betas=(0.9, 0.95)
)
scaler = torch.amp.GradScaler("cpu", enabled=False)
batch = dict(zip("xy", get_batch("train")))  # fetched one micro step ahead: it belongs to the state
run = datastates.open("runs").track(
    model=model, optimizer=optimizer, scaler=scaler, batch=batch, best_val_loss=1e9
)
while run.step < max_iters:
    iter_num = run.step
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        run.values["best_val_loss"] = min(run.values["best_val_loss"], losses["val"])
        print("eval", iter_num, losses["train"].hex(), run.values["best_val_loss"].hex(), flush=True)
    for micro_step in range(gradient_accumulation_steps):
        loss = model(batch["x"], batch["y"]) / gradient_accumulation_steps
        batch["x"], batch["y"] = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print("train", iter_num + 1, loss.item().hex(), flush=True)
    run.capture(metrics={"loss": loss.item()}).wait("durable")
"""

MINGPT = """
from collections import defaultdict
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler
import datastates

class SortDataset(Dataset):
    def __len__(self):
        return 10000

    def __getitem__(self, idx):
        while True:
            inp = torch.randint(3, (6,))
            if torch.rand(()) < 0.5 or inp.unique().nelement() <= 2:
                break
        cat = torch.cat((inp, inp.sort()[0]))
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[:5] = -1
        return x, y

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(3, 16), nn.Parameter(torch.zeros(11, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 3, bias=False)

    def forward(self, idx, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(11)
        logits = self.head(self.block(self.wte(idx) + self.wpe, mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.model, self.train_dataset = config, model, train_dataset
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"], betas=(0.9, 0.95))
        self.callbacks = defaultdict(list)

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks[onevent]:
            callback(self)

    def run(self):
        sampler = RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e10))
        loader = DataLoader(self.train_dataset, sampler=sampler, batch_size=self.config["batch_size"], num_workers=0)
        self.tracker = datastates.open("runs").track(model=self.model, optimizer=self.optimizer)
        self.model.train()
        self.iter_num = self.tracker.step
        data_iter = iter(self.tracker.steps(loader))
        while self.iter_num < self.config["max_iters"]:
            try:
                x, y = next(data_iter)
            except StopIteration:
                data_iter = iter(self.tracker.steps(loader))
                x, y = next(data_iter)
            logits, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.iter_num += 1
            self.trigger_callbacks("on_batch_end")

def batch_end_callback(trainer):
    print("train", trainer.iter_num, trainer.loss.item().hex(), flush=True)
    trainer.tracker.capture(metrics={"loss": trainer.loss.item()}).wait("durable")

torch.set_num_threads(1)
torch.manual_seed(3407)
trainer = Trainer({"learning_rate": 5e-3, "batch_size": 8, "max_iters": 30}, GPT(), SortDataset())
trainer.add_callback("on_batch_end", batch_end_callback)
trainer.run()
"""

PPO = """
import random
import numpy as np
import torch, torch.nn as nn
from torch.distributions import Categorical
import datastates

num_envs, num_steps, num_iterations, num_minibatches, update_epochs = 4, 12, 24, 2, 2
learning_rate, gamma, gae_lambda, clip_coef, ent_coef, vf_coef, max_grad_norm = 5e-3, 0.99, 0.95, 0.2, 0.01, 0.5, 0.5

class RunningMeanStd:
    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x):
        delta, total = x.mean(axis=0) - self.mean, self.count + len(x)
        spread = self.var * self.count + x.var(axis=0) * len(x) + delta**2 * self.count * len(x) / total
        self.mean = self.mean + delta * len(x) / total
        self.var, self.count = spread / total, total

class Carts:
    # Carts on a line: action 1 pushes to the right, 0 to the left. They begin again by themselves.
    def __init__(self, count):
        self.count, self.obs_rms = count, RunningMeanStd(2)

    def reset(self, seed):
        self.np_random = np.random.default_rng(seed)
        self.state, self.elapsed = self.np_random.uniform(-1, 1, (self.count, 2)), np.zeros(self.count, int)
        self.returned = np.zeros(self.count)
        return self.observe()

    def observe(self):
        self.obs_rms.update(self.state)
        return (self.state - self.obs_rms.mean) / np.sqrt(self.obs_rms.var + 1e-8)

    def step(self, action):
        self.state[:, 1] += 0.2 * (2 * action - 1) + self.np_random.normal(0, 0.05, self.count)
        self.state[:, 0] += 0.2 * self.state[:, 1]
        self.elapsed += 1
        reward = 1 - np.abs(self.state[:, 0])
        self.returned += reward
        done = (np.abs(self.state[:, 0]) > 2) | (self.elapsed >= 20)
        returns = self.returned[done].tolist()
        self.state[done] = self.np_random.uniform(-1, 1, (done.sum(), 2))
        self.elapsed[done], self.returned[done] = 0, 0
        return self.observe(), reward, done, returns

    def state_dict(self):
        own = ("state", "elapsed", "returned")
        statistics = dict(vars(self.obs_rms))
        return {**{name: getattr(self, name) for name in own}, "obs_rms": statistics, "rng": self.np_random.bit_generator.state}

    def load_state_dict(self, state):
        self.np_random.bit_generator.state = state.pop("rng")
        vars(self.obs_rms).update(state.pop("obs_rms"))
        vars(self).update(state)

def layer(inputs, outputs, std=2**0.5):
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, std)
    nn.init.zeros_(made.bias)
    return made

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer(2, 16), nn.Tanh(), layer(16, 1, std=1.0))
        self.actor = nn.Sequential(layer(2, 16), nn.Tanh(), layer(16, 2, std=0.01))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)

torch.set_num_threads(1)
random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
envs = Carts(num_envs)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5)
obs, actions = torch.zeros(num_steps, num_envs, 2), torch.zeros(num_steps, num_envs)
logprobs, rewards, dones, values = (torch.zeros(num_steps, num_envs) for _ in range(4))
next_obs = torch.tensor(envs.reset(seed=1), dtype=torch.float32)
next_done = torch.zeros(num_envs)
run = datastates.open("runs").track(
    agent=agent, optimizer=optimizer, envs=envs, next_obs=next_obs, next_done=next_done
)
for iteration in range(run.step + 1, num_iterations + 1):
    optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / num_iterations) * learning_rate
    for step in range(num_steps):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
        values[step], actions[step], logprobs[step] = value.flatten(), action, logprob
        found, reward, done, returns = envs.step(action.numpy())
        rewards[step] = torch.tensor(reward)
        next_obs.copy_(torch.tensor(found)), next_done.copy_(torch.tensor(done))
        if returns:
            print("return", iteration, step, *(each.hex() for each in returns), flush=True)
    with torch.no_grad():
        next_value = agent.get_value(next_obs).flatten()
        advantages, lastgaelam = torch.zeros_like(rewards), 0
        for t in reversed(range(num_steps)):
            nextnonterminal = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
            nextvalues = next_value if t == num_steps - 1 else values[t + 1]
            delta = rewards[t] + gamma * nextvalues * nextnonterminal - values[t]
            advantages[t] = lastgaelam = delta + gamma * gae_lambda * nextnonterminal * lastgaelam
        returns = advantages + values
    b_obs, b_actions, b_logprobs = obs.flatten(0, 1), actions.flatten(), logprobs.flatten()
    b_advantages, b_returns, b_inds = advantages.flatten(), returns.flatten(), np.arange(num_envs * num_steps)
    for epoch in range(update_epochs):
        np.random.shuffle(b_inds)
        for mb_inds in np.split(b_inds, num_minibatches):
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions[mb_inds])
            ratio = (newlogprob - b_logprobs[mb_inds]).exp()
            mb_advantages = b_advantages[mb_inds]
            mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
            pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()
            v_loss = 0.5 * ((newvalue.flatten() - b_returns[mb_inds]) ** 2).mean()
            loss = pg_loss - ent_coef * entropy.mean() + vf_coef * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
            optimizer.step()
    print("train", iteration, loss.item().hex(), optimizer.param_groups[0]["lr"].hex(), flush=True)
    run.capture(metrics={"loss": loss.item()}).wait("durable")
"""

PUBLIC = {
    "mnist": MNIST,
    "imagenet": IMAGENET,
    "dcgan": DCGAN,
    "nanoGPT": NANOGPT,
    "minGPT": MINGPT,
    "PPO": PPO,
}
"""Scripts that track what their training depends on."""


def _changed(script: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in script
        script = script.replace(old, new)
    return script


INEXACT = {
    "nanoGPT, a batch that is bound again": (
        _changed(
            NANOGPT,
            ('batch = dict(zip("xy", get_batch("train")))', 'X, Y = get_batch("train")'),
            ("batch=batch", "X=X, Y=Y"),
            ('batch["x"], batch["y"]', "X, Y"),
        ),
        ["X", "Y"],
    ),
    "PPO, observations that are bound again": (
        _changed(
            PPO,
            (
                "next_obs.copy_(torch.tensor(found)), next_done.copy_(torch.tensor(done))",
                (
                    "next_obs, next_done = torch.tensor(found, dtype=torch.float32),"
                    " torch.tensor(done).float()"
                ),
            ),
        ),
        ["next_obs", "next_done"],
    ),
    "PPO, running statistics that are bound again": (
        _changed(
            PPO,
            ("statistics = dict(vars(self.obs_rms))", "statistics = {}"),
            ("envs=envs,", "envs=envs, mean=envs.obs_rms.mean, var=envs.obs_rms.var,"),
        ),
        ["mean", "var"],
    ),
}
"""Scripts that track an object whose name they bind again, and the names that the lines name
which they log."""
