"""What the environment says of ranks is read as whoever started the process meant it, or refused."""

import pytest

from offbeat import launchers
from offbeat.errors import ConfigError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "gpu[07-08,11]", "SLURM_NODEID": "2",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "3",
}  # fmt: skip
KUBEFLOW = {
    "PET_NODE_RANK": "1", "PET_NNODES": "4", "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500",
}  # fmt: skip


def told(environ, **given):
    place = launchers.find(environ, **given)
    return place.rank, place.world_size, place.local_rank, *launchers.meeting_place(environ, place)


def test_a_process_of_which_nobody_says_anything_is_the_only_one():
    assert told({}) == (0, 1, None, None, 29500)
    assert launchers.find({}).told_by == "nobody, so it is the only one"


@pytest.mark.parametrize(
    ("environ", "expected", "by"),
    [
        (TORCHRUN, (3, 8, 1, "10.0.0.1", 29400), "torchrun (RANK, WORLD_SIZE)"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, (0, 2, None, None, 29500), "the environment (RANK, WORLD_SIZE)"),
        (SRUN, (5, 6, 1, "gpu07", 30569), "Slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS)"),
        (KUBEFLOW, (1, 4, None, "job-node-0-0.job", 29500), "Kubeflow Trainer (PET_NODE_RANK, PET_NNODES)"),
        (OPEN_MPI, (3, 4, 1, None, 29500), "Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, None, None, 29500), "MPI (PMI_RANK, PMI_SIZE)"),
        # Whose processes inherit what the step that started their daemon says.
        (SRUN | OPEN_MPI, (3, 4, 1, None, 29500), "Open MPI"),
        # One step on each machine, whose ranks say what belongs together.
        (SRUN | {"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, None, None, 29500), "the environment"),
        # torchrun, started by srun on each node, or by Kubeflow: what is nearest to the process counts.
        (SRUN | TORCHRUN, (3, 8, 1, "10.0.0.1", 29400), "torchrun (RANK, WORLD_SIZE)"),
        (KUBEFLOW | TORCHRUN, (3, 8, 1, "10.0.0.1", 29400), "torchrun (RANK, WORLD_SIZE)"),
        # With an address of one's own, as many batch scripts export it.
        (SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1"}, (5, 6, 1, "head", 1), "Slurm (SLURM_PROCID, "),
    ],
)
def test_whoever_has_started_it_is_understood(environ, expected, by):
    assert told(environ) == expected
    assert launchers.find(environ).told_by.startswith(by)


def test_a_batch_script_of_slurm_is_one_process_however_many_tasks_its_job_has():
    script = {name: value for name, value in SRUN.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
    assert told(script)[:2] == (0, 1)
    assert "SLURM_NTASKS is 6, and this process was not" in launchers.overlooked(
        script, launchers.find(script)
    )


@pytest.mark.parametrize(
    ("config", "num"),
    [
        ('{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}', 2),
        ('{"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": {"0": "d:1"}}}', 4),
        ('{"cluster": {"worker": ["a:2222"]}, "task": {"type": "worker", "index": 0}}', None),
        ('{"task": {"type": "worker", "index": 0}}', None),
        ("{}", None),
        ("", None),
        ("[]", None),
        ("null", None),
        ('{"cluster": 3}', None),
        ('{"cluster": {"worker": 2, "ps": "a:2222"}}', None),
        ("worker", None),
        ("[" * 100_000, None),
    ],
)
def test_tensorflows_cluster_is_not_read_and_who_is_of_several_in_it_is_told(config, num):
    environ = {"TF_CONFIG": config}
    assert told(environ)[:2] == (0, 1)
    warning = launchers.overlooked(environ, launchers.find(environ))
    if num is None:
        assert warning is None
    else:
        assert f"TF_CONFIG names {num} tasks, and is not read here" in warning
        assert "set RANK and WORLD_SIZE, or give rank= and world_size=" in warning
        environ |= {"RANK": "0", "WORLD_SIZE": "2"}
        assert launchers.overlooked(environ, launchers.find(environ)) is None
        given = launchers.find({"TF_CONFIG": config}, rank=0, world_size=2)
        assert launchers.overlooked({"TF_CONFIG": config}, given) is None


@pytest.mark.parametrize("environ", [{}, SRUN, TORCHRUN, {"SLURM_NTASKS": "1"}])
def test_of_a_process_that_is_told_of_or_alone_nothing_was_overlooked(environ):
    assert launchers.overlooked(environ, launchers.find(environ)) is None


def test_where_processes_meet_is_looked_for_when_it_is_asked_for():
    services = {"MASTER_PORT": "tcp://10.0.0.1:80"}  # as Kubernetes says it of a service called "master"
    place = launchers.find(services)
    assert (place.rank, place.world_size) == (0, 1)
    with pytest.raises(ConfigError, match=r"MASTER_PORT is 'tcp://10.0.0.1:80' in the environment"):
        launchers.meeting_place(services, place)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[1-4]", "gpu1"),
        ("gpu[003,007-009],login", "gpu003"),
        ("rack[0-1]node[08-11,14]", "rack0node08"),
        ("a-b[1-2]-ib,c", "a-b1-ib"),
    ],
)
def test_slurms_first_machine_is_where_processes_meet(nodes, first):
    assert told(SRUN | {"SLURM_JOB_NODELIST": nodes})[3] == first
    assert told(SRUN | {"SLURM_STEP_NODELIST": nodes})[3] == first


def test_jobs_and_steps_that_share_a_machine_meet_at_ports_of_their_own():
    environs = [SRUN | {"SLURM_JOB_ID": j, "SLURM_STEP_ID": s} for j in ("7", "99", "4000000") for s in "01"]
    ports = [told(environ)[4] for environ in environs]
    assert len(set(ports)) == len(ports)
    assert all(20_000 <= port < 32_000 for port in ports)


@pytest.mark.parametrize("environ", [TORCHRUN, SRUN, OPEN_MPI, KUBEFLOW, {"PMI_RANK": "1", "PMI_SIZE": "2"}])
def test_a_variable_that_is_empty_says_nothing(environ):
    empty = dict.fromkeys(environ, "")
    assert told(empty) == (0, 1, None, None, 29500)
    assert launchers.overlooked(empty, launchers.find(empty)) is None
    plain = dict.fromkeys(TORCHRUN, "")
    assert told(plain | environ) == told(environ), "the next that says it counts"


def test_an_empty_variable_beside_others_says_nothing_of_its_own():
    assert told(TORCHRUN | {"LOCAL_RANK": "", "MASTER_PORT": ""}) == (3, 8, None, "10.0.0.1", 29500)
    assert told(SRUN | {"SLURM_STEP_ID": "", "MASTER_ADDR": ""}) == (5, 6, 1, "gpu07", 30567)
    assert told(SRUN | {"SLURM_JOB_ID": ""})[4] == 29500
    assert told(KUBEFLOW | {"PET_MASTER_PORT": ""})[4] == 29500
    assert launchers.find(TORCHRUN | {"TORCHELASTIC_RUN_ID": ""}).told_by.startswith("the environment")
    agents = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert not launchers.has_agents_store(agents | {"MASTER_PORT": ""})


def test_what_is_given_wins_over_what_is_said():
    # Whoever numbers processes knows which device is whose.
    assert told(TORCHRUN, rank=0, world_size=2) == (0, 2, None, "10.0.0.1", 29400)
    assert told(TORCHRUN, rank=7)[:2] == (7, 8)
    assert told(TORCHRUN, world_size=4)[:2] == (3, 4)
    assert told({"RANK": "nonsense", "WORLD_SIZE": "2"}, rank=1, world_size=3)[:2] == (1, 3)
    assert launchers.find(TORCHRUN, rank=7).told_by == "the rank given and torchrun (RANK, WORLD_SIZE)"
    assert told({}, world_size=1)[:2] == (0, 1)


@pytest.mark.parametrize(
    ("environ", "given", "what"),
    [
        ({"RANK": "1"}, {}, "RANK is '1' in the environment and WORLD_SIZE is not there: set both"),
        ({"WORLD_SIZE": "2"}, {}, "WORLD_SIZE is '2' in the environment and RANK is not there"),
        ({"RANK": "1", "WORLD_SIZE": ""}, {}, "RANK is '1' in the environment and WORLD_SIZE is empty: set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, {}, "rank is 2 and world_size is 2, by the environment (RANK"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, {}, "RANK is 'one' in the environment: it is a whole number"),
        (KUBEFLOW | {"PET_NNODES": "1:4"}, {}, "PET_NNODES is '1:4' in the environment: it is"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, {}, "RANK is '-1' in the environment"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "a"}, {}, "LOCAL_RANK is 'a' in the environment"),
        ({}, {"rank": 1}, "rank is given and world_size is not, nor does the environment say it"),
        ({}, {"world_size": 3}, "world_size is given and rank is not"),
        ({}, {"rank": True, "world_size": 0}, "rank is True: give a whole number, 0 or more, or None; w"),
        (TORCHRUN, {"rank": 8}, "rank is 8 and world_size is 8, by the rank given and torchrun"),
    ],
)  # fmt: skip
def test_what_is_half_said_or_no_number_is_refused_with_its_name_and_value(environ, given, what):
    with pytest.raises(ConfigError) as caught:
        launchers.find(environ, **given)
    assert what in str(caught.value)


def test_whether_the_launcher_listens_where_the_processes_meet():
    agents = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert launchers.has_agents_store(agents)
    assert not launchers.has_agents_store(TORCHRUN)
    assert not launchers.has_agents_store(agents | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not launchers.has_agents_store({"TORCHELASTIC_USE_AGENT_STORE": "True"}), "nobody says where"
