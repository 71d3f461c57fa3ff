"""How the environment describes processes that train together."""

import json
import socket

import keras
import pytest

from keras_vit.train import distribution
from keras_vit.train.distribution import cluster
from keras_vit.train.distribution.cluster import Cluster, expand_hosts, find_cluster
from keras_vit.train.distribution.devices import Devices

pytestmark = pytest.mark.backend_free

TWO = {"worker": ["a:1001", "b:1002"]}
SLURM = {
    "SLURM_JOB_ID": "40123",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
# What srun of Slurm 22.05.8 set: nodes of the step, tasks per node, and of each task SLURM_PROCID,
# _LOCALID, _NODEID, _GTIDS and SLURMD_NODENAME.
BLOCKS = {
    "-N1 -n2": ("b-07", "2", "0 0 0 0,1 b-07", "1 1 0 0,1 b-07"),
    "-N2 -n2": ("n[1-2]", "1(x2)", "0 0 0 0 n1", "1 0 1 1 n2"),
    "-N2 -n3": ("b-07,n3", "2,1", "0 0 0 0,1 b-07", "1 1 0 0,1 b-07", "2 0 1 2 n3"),
    "-N1 -n2 : -N1 -n1": ("b-07,n1", "2,1", "0 0 0 0,1 b-07", "1 1 0 0,1 b-07", "2 0 1 2 n1"),
    "-N2 -n2 -m cyclic": ("b-07,n1", "1(x2)", "0 0 0 0 b-07", "1 0 1 1 n1"),
    "-N3 -n5 -w n1,n3,b-07": (
        *("b-07,n[1,3]", "3,1(x2)", "0 0 0 0,1,2 b-07", "1 1 0 0,1,2 b-07", "2 2 0 0,1,2 b-07"),
        *("3 0 1 3 n1", "4 0 2 4 n3"),
    ),
    "-N4 --ntasks-per-node=2": (
        *("b-07,n[1-3]", "2(x4)", "0 0 0 0,1 b-07", "1 1 0 0,1 b-07", "2 0 1 2,3 n1"),
        *("3 1 1 2,3 n1", "4 0 2 4,5 n2", "5 1 2 4,5 n2", "6 0 3 6,7 n3", "7 1 3 6,7 n3"),
    ),
}
NOT_IN_BLOCKS = {
    "-m cyclic": (
        *("b-07,n1", "3,1", "0 0 0 0,2,3 b-07", "1 0 1 1 n1", "2 1 0 0,2,3 b-07"),
        "3 2 0 0,2,3 b-07",
    ),
    "-m plane=1": (
        *("b-07,n1", "2(x2)", "0 0 0 0,2 b-07", "1 0 1 1,3 n1", "2 1 0 0,2 b-07", "3 1 1 1,3 n1"),
    ),
    "-m arbitrary": (
        *("b-07,n[1,3]", "1(x2),2", "0 0 2 0,2 n3", "1 0 1 1 n1", "2 1 2 0,2 n3", "3 0 0 3 b-07"),
    ),
}
KERAS = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1001",
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "4",
    "KERAS_DISTRIBUTION_PROCESS_ID": "3",
}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_PORT": "1001"}


def tf_config(workers=TWO, kind="worker", index=1):
    return {"TF_CONFIG": json.dumps({"cluster": workers, "task": {"type": kind, "index": index}})}


def test_no_variables_mean_no_cluster():
    for backend in ("tensorflow", "jax", "torch"):
        assert find_cluster(backend, {}) is None
        assert find_cluster(backend, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}) is None  # no srun
    assert find_cluster("tensorflow", {"TF_CONFIG": "{}"}) is None
    assert find_cluster("tensorflow", tf_config({"worker": ["a:1001"]}, index=0)) is None


def test_tf_config():
    assert find_cluster("tensorflow", tf_config()) == Cluster(
        ("a:1001", "b:1002"), 2, 1, "TF_CONFIG"
    )
    chief = {"chief": ["c:1003"], **TWO}
    found = find_cluster("tensorflow", tf_config(chief))
    assert (found.addresses, found.process) == (("c:1003", "a:1001", "b:1002"), 2)
    assert find_cluster("tensorflow", tf_config(chief, "chief", 0)).process == 0
    assert find_cluster("jax", tf_config()) is None


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"TF_CONFIG": "{'cluster'"}, "TF_CONFIG must be JSON.*Received: TF_CONFIG="),
        ({"TF_CONFIG": '["worker"]'}, "TF_CONFIG must be JSON"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": null}'}, "must be JSON"),
        (tf_config(index=2), 'of its "cluster": worker 0, worker 1. Received: worker 2'),
        (tf_config(kind="chief"), "Received: chief 1"),
        (tf_config({**TWO, "ps": ["p:1"]}), 'may have "chief". Received: ps'),
        (tf_config({"worker": ["a:1001", "a:1001"]}), "must differ. Received twice: a:1001"),
        (tf_config({"worker": ["a:1001", "b"]}), "must be HOST:PORT. Received: 'b'"),
        (tf_config({"worker": ["a:1001", "b:70000"]}), "must be HOST:PORT. Received: 'b:70000'"),
    ],
)
def test_wrong_tf_config_is_named(variables, message):
    with pytest.raises(ValueError, match=message):
        find_cluster("tensorflow", variables)


def test_keras_variables():
    assert find_cluster("jax", KERAS) == Cluster(("a:1001",), 4, 3, "KERAS_DISTRIBUTION_PROCESS_ID")
    for name, value, message in (
        ("JOB_ADDRESSES", "a:1,b:2", "must name the first process, or each of the 4"),
        ("JOB_ADDRESSES", "", "KERAS_DISTRIBUTION_JOB_ADDRESSES must be set"),
        ("NUM_PROCESSES", "four", "NUM_PROCESSES must be a whole number. Received: .*'four'"),
        ("PROCESS_ID", "4", "must be from 0 to 3, with 4 processes. Received: 4"),
    ):
        with pytest.raises(ValueError, match=message):
            find_cluster("jax", {**KERAS, f"KERAS_DISTRIBUTION_{name}": value})


def test_torchrun():
    wanted = Cluster(("127.0.0.1:1001",), 4, 3, "RANK", 1)
    assert find_cluster("torch", TORCHRUN) == wanted
    assert find_cluster("torch", {**TORCHRUN, "MASTER_ADDR": "m"}).addresses == ("m:1001",)
    with pytest.raises(ValueError, match="RANK must be from 0 to 3.*Received: 4"):
        find_cluster("torch", {**TORCHRUN, "RANK": "4"})
    with pytest.raises(ValueError, match="MASTER_PORT must be a whole number"):
        find_cluster("torch", {**TORCHRUN, "MASTER_PORT": ""})


def test_torchrun_requires_the_torch_backend():
    with pytest.raises(ValueError, match="must be torch under torchrun.*KERAS_BACKEND=jax"):
        find_cluster("jax", {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"})
    assert find_cluster("torch", {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).process == 3


def test_processes_of_one_machine_are_counted():
    workers = {"worker": ["a:1", "b:1", "a:2", "a:3"]}
    found = [find_cluster("tensorflow", tf_config(workers, index=i)).local for i in range(4)]
    assert found == [0, 0, 1, 2]


def slurm_tasks(nodes, tasks_per_node, *tasks):
    """The variables of each task of a step, and the node that it is on."""
    for task in tasks:
        process, local, node, on_this_node, name = task.split()
        step = {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks_per_node}
        step |= {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_GTIDS": on_this_node}
        step |= {"SLURM_PROCID": process, "SLURM_LOCALID": local, "SLURM_NODEID": node}
        yield {**step, "SLURM_STEP_NUM_TASKS": str(len(tasks))}, name


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_slurm(backend):
    found = find_cluster(backend, SLURM)
    first = 20000 + 16 * (40123 % 790)
    assert found.addresses == (f"gpu07:{first}", f"gpu07:{first + 1}", f"gpu08:{first}")
    assert (found.processes, found.process, found.local) == (3, 2, 0)
    with pytest.raises(ValueError, match="must name the 3 tasks. Received: gpu7, 2,1"):
        find_cluster(backend, {**SLURM, "SLURM_STEP_NODELIST": "gpu7"})
    own = {"tensorflow": tf_config(), "jax": KERAS, "torch": TORCHRUN}[backend]
    # Variables of the backend take precedence over Slurm's.
    assert find_cluster(backend, {**SLURM, **own}) == find_cluster(backend, own)


@pytest.mark.parametrize("step", BLOCKS.values(), ids=BLOCKS)
def test_slurm_tasks_find_each_other(step):
    tasks = list(slurm_tasks(*step))
    addresses = find_cluster("jax", tasks[0][0]).addresses
    assert len(set(addresses)) == len(tasks)
    for number, (task, node) in enumerate(tasks):
        local = int(task["SLURM_LOCALID"])
        assert find_cluster("jax", task) == Cluster(addresses, len(tasks), number, "Slurm", local)
        assert addresses[number].partition(":")[0] == node


@pytest.mark.parametrize("step", NOT_IN_BLOCKS.values(), ids=NOT_IN_BLOCKS)
def test_slurm_tasks_that_are_not_in_blocks_are_refused(step):
    refused = []
    for task, node in slurm_tasks(*step):
        try:
            found = find_cluster("jax", task)
        except ValueError as error:
            assert "--distribution=block. Received: tasks" in str(error)
            refused.append(task["SLURM_PROCID"])
        else:  # the only task of its node, where it would be in blocks too
            assert found.addresses[found.process].partition(":")[0] == node
    assert "0" in refused  # so the others do not wait for long


def test_slurm_without_srun_is_one_process():
    batch = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "b-07,n1", "SLURM_NTASKS": "4"}
    batch |= {"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NNODES": "2"}
    assert find_cluster("jax", batch) is None  # in salloc
    own = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
    assert find_cluster("jax", {**batch, **own}) is None  # in the script that sbatch starts
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "b-07", "SLURM_STEP_TASKS_PER_NODE": "1"}
    srun_one = {**batch, **own, **step, "SLURM_STEP_NUM_TASKS": "1"}
    assert find_cluster("jax", srun_one) is None


def test_slurm_steps_and_jobs_have_their_own_ports():
    def ports(job, step):
        tasks = slurm_tasks(*BLOCKS["-N1 -n2"])
        numbers = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        found = find_cluster("jax", {**next(tasks)[0], **numbers})
        return {int(address.rpartition(":")[2]) for address in found.addresses}

    seen = [ports(job, step) for job in range(41000, 41010) for step in range(5)]
    assert len(set().union(*seen)) == 2 * len(seen)
    assert all(20000 <= min(one) and max(one) < 32768 for one in seen)


def test_slurm_host_names():
    assert expand_hosts("a") == ["a"]
    assert expand_hosts("n[1-2]x[8,10-11],m") == [
        *(f"n{i}x{j}" for i in (1, 2) for j in (8, 10, 11)),
        "m",
    ]
    assert expand_hosts("gpu[099-101]") == ["gpu099", "gpu100", "gpu101"]
    with pytest.raises(ValueError, match="must name hosts. Received: 'gpu\\[a-b\\]'"):
        expand_hosts("gpu[a-b]")


def test_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wanted = Cluster((f"127.0.0.1:{port}", "b:1"), 2, 0, "TF_CONFIG")
        with pytest.raises(OSError, match=f"TF_CONFIG must name a free port.*{port}: another"):
            cluster.check_port(wanted)
    cluster.check_port(wanted)


def test_wrong_devices_are_refused():
    for wrong in ("gpu", "model:0", "model", ""):
        with pytest.raises(ValueError, match=f'"one", "all" or "model:N".*devices={wrong!r}'):
            with distribution.scope(wrong):
                pass
    if keras.backend.backend() != "jax":
        with pytest.raises(ValueError, match="on t.*: only JAX splits weights.*'model:2'"):
            with distribution.scope("model:2"):
                pass
    with pytest.raises(ValueError, match="run.batch_size must be a multiple of the 4 devices.*=6"):
        Devices(replicas=4).check_batch(6, "run.batch_size")
    assert str(Devices(["GPU 0", "GPU 0"], 4, 2)).endswith("4 parts of 2 processes: GPU 0")
