"""A Kubernetes control plane and its nodes on this machine, without an uplink.

The first node runs the control plane, too. Addresses, by family: node N is 10.200.0.N and
fd00:200::N, its pods are 10.244.N.0/24 and fd00:244:N::/64, Services 10.96.0.0/16 and
fd00:96::/112.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.cluster import binaries, images
from tests.cluster.certificates import Files, token_keys
from tests.cluster.node import Node, until

NODE_ADDRESS = {"ipv4": "10.200.0.{}", "ipv6": "fd00:200::{}"}
NODES_MASK = {"ipv4": "24", "ipv6": "64"}
PODS = {"ipv4": "10.244.{}.0/24", "ipv6": "fd00:244:{}::/64"}
ALL_PODS = {"ipv4": "10.244.0.0/16", "ipv6": "fd00:244::/32"}
SERVICES = {"ipv4": "10.96.0.0/16", "ipv6": "fd00:96::/112"}
KUBERNETES_SERVICE = {"ipv4": "10.96.0.1", "ipv6": "fd00:96::1"}
GPUS = "16"
CTR = ("ctr", "-a", "/run/containerd/containerd.sock", "-n", "k8s.io")
START_S = 180
"""Bound on each wait of the start; an idle machine needs 25 s for the whole."""


class Cluster:
    """A cluster. As a context manager it starts, and ends with all that runs on it."""

    def __init__(
        self,
        name: str = "main",
        *,
        nodes: int = 1,
        families: Sequence[str] = ("ipv4",),
        dry: bool = False,
    ) -> None:
        """`families` are "ipv4" and "ipv6", the primary one first. A `dry` cluster is etcd and the
        API server alone: it takes objects, and runs nothing."""
        self.name, self.families, self.dry = name, tuple(families), dry
        self._place(Path(mkdtemp(prefix=f"kvroute-cluster-{name}-")))
        self._count = nodes
        self.nodes: list[Node] = []
        self.dead: list[Node] = []

    @classmethod
    def attach(cls, folder: Path) -> "Cluster":
        """The cluster that another process keeps, by its `folder`."""
        state = json.loads((folder / "state.json").read_text())
        cluster = cls.__new__(cls)
        cluster._place(folder)
        cluster.name, cluster.families, cluster.dry = state["name"], state["families"], False
        cluster.nodes = [Node(name, folder / name, pid) for name, pid in state["nodes"].items()]
        cluster._count, cluster.dead = len(cluster.nodes), []
        return cluster

    def _place(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.kubeconfig = folder / "admin.conf"
        self.archives = folder / "images"

    def __enter__(self) -> "Cluster":
        begun = time.monotonic()
        try:
            self._start()
        except BaseException:
            self._say_logs()
            self.end()
            raise
        sys.stderr.write(f"cluster {self.name}: started in {time.monotonic() - begun:.0f} s\n")
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends every process, and removes the files but for the logs of a cluster that failed."""
        for node in reversed(self.nodes):
            if node not in self.dead:
                node.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    # What tests use

    def environment(self) -> dict[str, str]:
        """Variables for a shell in the cluster's network: PATH has kubectl, helm (3), helm4."""
        helm = {f"HELM_{kind}_HOME": str(self.folder / "helm") for kind in ("CACHE", "CONFIG")}
        path = f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        unset = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        return inherited | helm | {"PATH": path, "KUBECONFIG": str(self.kubeconfig)}

    def run(
        self,
        *command: str,
        input: str | None = None,
        cwd: Path | None = None,
        timeout: float = 300,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """A command in the network of the first node, with kubectl and Helm on its PATH."""
        ran = subprocess.run(
            self.nodes[0].inside(command),
            input=input,
            cwd=cwd,
            env=self.environment() | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and ran.returncode:
            said = f"{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
            raise RuntimeError(f"{' '.join(command)[:300]}: exit status {ran.returncode}\n{said}")
        return ran

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float = 300) -> str:
        """What kubectl prints; raises with its error where it fails."""
        return self.run("kubectl", *arguments, input=input, timeout=timeout).stdout

    def get(self, *arguments: str) -> Any:
        """The object, or the list's `items`, of `kubectl get`."""
        found = json.loads(self.kubectl("get", *arguments, "--output", "json"))
        return found["items"] if found["kind"] == "List" else found

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Applies objects on the server's side, by strict validation."""
        if not objects:
            return
        text = "\n".join(json.dumps(one) for one in objects)
        self.kubectl("apply", "--server-side", "--validate=strict", "-f", "-", input=text)

    def load(self, *archives: Path) -> None:
        """Gives images, of `docker save`'s format, to each node."""
        for node in self.nodes:
            for archive in archives:
                node.run(*CTR, "images", "import", "--no-unpack", str(archive), timeout=300)

    def address(self, number: int = 1, family: str | None = None) -> str:
        return NODE_ADDRESS[family or self.families[0]].format(number)

    def kill(self, node: Node) -> None:
        """Ends a node at once, as a machine ends that loses its power."""
        node.end()
        self.dead.append(node)

    def stop_api_server(self) -> None:
        """Ends the API server, as an upgrade of the control plane does."""
        self.nodes[0].stop("kube-apiserver", signal.SIGKILL)

    def start_api_server(self) -> None:
        """Starts it again, and waits until it answers."""
        self._api_server()

    # How it starts

    def _start(self) -> None:
        binaries.build(binaries.API if self.dry else binaries.ALL)
        binaries.fetch()
        self.bin.mkdir()
        for one in binaries.API if self.dry else binaries.ALL:
            (self.bin / one.name).symlink_to(one.path)
        for number in range(1, self._count + 1):
            self.nodes.append(Node.make(f"node-{number}", self.folder / f"node-{number}"))
        self._network()
        self._certificates()
        data = self.folder / "etcd"
        self._first("etcd", "--data-dir", str(data), "--unsafe-no-fsync")
        self._api_server()
        # By the server: what the client's apply writes down is too long for an annotation.
        files = [word for one in binaries.RESOURCES for word in ("-f", str(one.path))]
        self.kubectl("apply", "--server-side", *files)
        if not self.dry:
            self._control_plane()
            for node in self.nodes:
                self._machine(node)
            self._wait_for_nodes()
            self._gpus()
            self._small_requests()
            self._serve_metrics()
        nodes = {node.name: node.pid for node in self.nodes}
        state = {"name": self.name, "families": self.families, "nodes": nodes}
        (self.folder / "state.json").write_text(json.dumps(state))

    def _first(self, name: str, *arguments: str) -> None:
        self.nodes[0].start(name, str(self.bin / name), *arguments)

    def _network(self) -> None:
        """A bridge on the first node, to which the others have a cable each. No uplink: what a
        node has no route for goes nowhere."""
        first = self.nodes[0]
        first.run("ip", "link", "add", "nodes", "type", "bridge")
        first.run("sysctl", "-qw", "net.bridge.bridge-nf-call-iptables=1")
        first.run("sysctl", "-qw", "net.bridge.bridge-nf-call-ip6tables=1")
        for number, node in enumerate(self.nodes, 1):
            if node is not first:
                cable = f"to-{node.name}"
                # Process ids of this machine: only the network is the node's.
                add = ("ip", "link", "add", cable, "type", "veth", "peer", "name", "nodes")
                subprocess.run(first.inside([*add, "netns", str(node.pid)]), check=True)
                first.run("ip", "link", "set", cable, "master", "nodes", "up")
            node.run("ip", "link", "set", "nodes", "up")
            for family in self.families:
                address = self.address(number, family)
                of_family = "-6" if family == "ipv6" else "-4"
                node.run("ip", "addr", "add", f"{address}/{NODES_MASK[family]}", "dev", "nodes")
                # Services' addresses are unreachable without a route, whatever it is.
                node.run("ip", of_family, "route", "add", "default", "dev", "nodes")
                for other in range(1, self._count + 1):
                    if other != number:
                        via = ("via", self.address(other, family))
                        node.run("ip", of_family, "route", "add", PODS[family].format(other), *via)

    def _certificates(self) -> None:
        ca, front = Files(self.folder, "ca"), Files(self.folder, "front-ca")
        server = f"https://{_bracketed(self.address())}:6443"
        service = ["kubernetes", "default", "svc", "cluster", "local"]
        names = [".".join(service[:length]) for length in (1, 2, 3, 5)]
        families = self.families
        addresses = [self.address(1, one) for one in families]
        addresses += [KUBERNETES_SERVICE[one] for one in families]
        ca.sign("apiserver", "kube-apiserver", hosts=[*addresses, "127.0.0.1", "localhost", *names])
        ca.sign("apiserver-kubelet", "kube-apiserver-kubelet-client", "system:masters")
        front.sign("front", "front-proxy-client")
        for name, subject in {
            "admin": ("admin", "system:masters"),
            "controller-manager": ("system:kube-controller-manager", ""),
            "scheduler": ("system:kube-scheduler", ""),
            "proxy": ("system:kube-proxy", ""),
        }.items():
            ca.sign(name, *subject)
            ca.kubeconfig(name, server)
        for number, node in enumerate(self.nodes, 1):
            hosts = [node.name, *(self.address(number, one) for one in families)]
            ca.sign(f"{node.name}-server", node.name, hosts=hosts)
            ca.sign(node.name, f"system:node:{node.name}", "system:nodes")
            ca.kubeconfig(node.name, server)
        token_keys(self.folder)

    def _api_server(self) -> None:
        here = self.folder
        audit = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}],
        }
        (here / "audit.json").write_text(json.dumps(audit))
        self._first(
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={self.address()}",
            "--secure-port=6443",
            f"--tls-cert-file={here}/apiserver.crt",
            f"--tls-private-key-file={here}/apiserver.key",
            f"--client-ca-file={here}/ca.crt",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={here}/sa.pub",
            f"--service-account-signing-key-file={here}/sa.key",
            f"--service-cluster-ip-range={self._joined(SERVICES)}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--kubelet-client-certificate={here}/apiserver-kubelet.crt",
            f"--kubelet-client-key={here}/apiserver-kubelet.key",
            f"--kubelet-certificate-authority={here}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={here}/front-ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={here}/front.crt",
            f"--proxy-client-key-file={here}/front.key",
            f"--audit-policy-file={here}/audit.json",
            f"--audit-log-path={here}/audit.log",
            "--allow-privileged=true",
            "--feature-gates=MutatingAdmissionPolicy=true",
            "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
        )
        until(
            lambda: self.run("kubectl", "get", "--raw", "/readyz", check=False).returncode == 0,
            START_S,
            "the API server",
        )

    def _control_plane(self) -> None:
        here = self.folder
        self._first(
            "kube-controller-manager",
            *self._as("controller-manager"),
            f"--service-account-private-key-file={here}/sa.key",
            f"--root-ca-file={here}/ca.crt",
            "--use-service-account-credentials",
            "--leader-elect=false",
            f"--cluster-cidr={self._joined(ALL_PODS)}",
            "--bind-address=127.0.0.1",
        )
        self._first(
            "kube-scheduler",
            *self._as("scheduler"),
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
        )
        bound = "bind " + " ".join(self.address(1, family) for family in self.families)
        (here / "Corefile").write_text(
            f"""cluster.local:53 {{
                {bound}
                errors
                kubernetes cluster.local in-addr.arpa ip6.arpa {{
                    kubeconfig {self.kubeconfig}
                    pods insecure
                    endpoint_pod_names
                    ttl 5
                }}
                cache 2
            }}
            .:53 {{
                {bound}
                template ANY ANY {{
                    rcode NXDOMAIN
                }}
            }}
            """
        )
        self._first("coredns", "-conf", str(here / "Corefile"))

    def _as(self, component: str) -> list[str]:
        config = self.folder / f"{component}.conf"
        return [
            f"--{kind}kubeconfig={config}" for kind in ("", "authentication-", "authorization-")
        ]

    def _joined(self, of_family: Mapping[str, str]) -> str:
        return ",".join(of_family[family] for family in self.families)

    def _machine(self, node: Node) -> None:
        """containerd, kubelet and kube-proxy of a node."""
        number = self.nodes.index(node) + 1
        here = node.folder
        addresses = [self.address(number, family) for family in self.families]
        (here / "containerd.toml").write_text(
            f"""version = 2
            root = "{here}/containerd"
            state = "/run/containerd/state"
            [grpc]
            address = "/run/containerd/containerd.sock"
            [plugins."io.containerd.grpc.v1.cri"]
            sandbox_image = "{images.PAUSE}"
            # Root of a virtual machine may lack CAP_SYS_RESOURCE.
            restrict_oom_score_adj = true
            disable_apparmor = true
            max_container_log_line_size = 262144
            [plugins."io.containerd.grpc.v1.cri".cni]
            bin_dir = "/usr/lib/cni"
            conf_dir = "{here}/cni"
            [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
            runtime_type = "io.containerd.runc.v2"
            """
        )
        (here / "cni").mkdir(exist_ok=True)
        ranges = [[{"subnet": PODS[family].format(number)}] for family in self.families]
        anywhere = {"ipv4": "0.0.0.0/0", "ipv6": "::/0"}
        bridge = {
            "type": "bridge",
            "bridge": "pods",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": ranges,
                "routes": [{"dst": anywhere[family]} for family in self.families],
            },
        }
        network = {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, {"type": "loopback"}]}
        (here / "cni" / "10-pods.conflist").write_text(json.dumps(network))
        node.start(
            "containerd",
            shutil.which("containerd") or "containerd",
            "--config",
            f"{here}/containerd.toml",
        )
        until(lambda: _answers(node, *CTR, "version"), START_S, "containerd")
        pause = images.pause(self.folder / "pause.tar")
        node.run(*CTR, "images", "import", "--no-unpack", str(pause))
        (here / "resolv.conf").write_text(f"nameserver {self.address()}\n")
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": addresses[0],
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{node.cgroup}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{self.folder}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{self.folder}/{node.name}-server.crt",
            "tlsPrivateKeyFile": f"{self.folder}/{node.name}-server.key",
            "clusterDNS": [self.address()],
            "clusterDomain": "cluster.local",
            "resolvConf": f"{here}/resolv.conf",
            "maxPods": 100,
            # A machine whose disk is nearly full is no reason to end pods, or to delete images that
            # cannot be pulled again.
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "podLogsDir": f"{here}/pods",
        }
        (here / "kubelet.json").write_text(json.dumps(kubelet))
        node.start(
            "kubelet",
            str(self.bin / "kubelet"),
            f"--config={here}/kubelet.json",
            f"--kubeconfig={self.folder}/{node.name}.conf",
            f"--root-dir={here}/kubelet",
            f"--node-ip={','.join(addresses)}",
            f"--hostname-override={node.name}",
        )
        proxy = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "bindAddress": addresses[0],
            "metricsBindAddress": "127.0.0.1:10249",
            "healthzBindAddress": "127.0.0.1:10256",
            "clusterCIDR": self._joined(ALL_PODS),
            "clientConnection": {"kubeconfig": f"{self.folder}/proxy.conf"},
            "conntrack": {"maxPerCore": 0},  # the limit is the machine's, not the namespace's
        }
        (here / "proxy.json").write_text(json.dumps(proxy))
        node.start(
            "kube-proxy",
            str(self.bin / "kube-proxy"),
            f"--config={here}/proxy.json",
            f"--hostname-override={node.name}",
        )

    def enforce_network_policies(self) -> None:
        """Starts what holds pods to NetworkPolicies, on each node."""
        for node in self.nodes:
            node.start(
                "kube-router",
                str(self.bin / "kube-router"),
                f"--kubeconfig={self.kubeconfig}",
                "--run-router=false",
                "--run-service-proxy=false",
                "--run-firewall=true",
                f"--hostname-override={node.name}",
                f"--service-cluster-ip-range={self._joined(SERVICES)}",
                f"--enable-ipv4={str('ipv4' in self.families).lower()}",
                f"--enable-ipv6={str('ipv6' in self.families).lower()}",
            )

    def _serve_metrics(self) -> None:
        """Starts metrics-server, by which HorizontalPodAutoscalers see CPU."""
        self._first(
            "metrics-server",
            *self._as("admin"),
            "--secure-port=10443",
            f"--cert-dir={self.folder}/metrics-server",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-certificate-authority={self.folder}/ca.crt",
            "--metric-resolution=15s",
        )
        family = "IPv6" if ip_address(self.address()).version == 6 else "IPv4"
        of_service = {"name": "metrics-server", "namespace": "kube-system"}
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": of_service,
                "spec": {"ports": [{"port": 443, "targetPort": 10443}]},
            },
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    **of_service,
                    "labels": {"kubernetes.io/service-name": "metrics-server"},
                },
                "addressType": family,
                "ports": [{"port": 10443, "name": ""}],
                "endpoints": [{"addresses": [self.address()], "conditions": {"ready": True}}],
            },
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": "v1beta1.metrics.k8s.io"},
                "spec": {
                    "group": "metrics.k8s.io",
                    "version": "v1beta1",
                    "groupPriorityMinimum": 100,
                    "versionPriority": 100,
                    "insecureSkipTLSVerify": True,
                    "service": {**of_service, "port": 443},
                },
            },
        )

    def _wait_for_nodes(self) -> None:
        def ready() -> bool:
            nodes = self.get("nodes")
            return len(nodes) == self._count and all(condition(one, "Ready") for one in nodes)

        until(ready, START_S, "nodes are ready")

    def _gpus(self) -> None:
        """Each node says that it has GPUs, as the tutorials' engines ask for them."""
        count = {"nvidia.com/gpu": GPUS}
        patch = json.dumps({"status": {"capacity": count, "allocatable": count}})
        for node in self.nodes:
            self.kubectl(
                "patch", "node", node.name, "--subresource=status", "--type=merge", "-p", patch
            )

    def _small_requests(self) -> None:
        """Whole cores that pods ask for become 1/50 of a core: the nodes have the machine's two."""
        pods = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
        large = (
            "object.spec.containers.exists(one, 'cpu' in one.?resources.?requests.orValue({}) &&"
            " quantity(one.resources.requests['cpu']).compareTo(quantity('250m')) >= 0)"
        )
        small = (
            "Object{spec: Object.spec{containers: object.spec.containers.map(one,"
            " Object.spec.containers{name: one.name, resources: Object.spec.containers.resources{"
            'requests: {"cpu": "20m"}}})}}'
        )
        of_policy = {"apiVersion": "admissionregistration.k8s.io/v1beta1"}
        name = {"metadata": {"name": "small-requests"}}
        self.apply(
            {
                **of_policy,
                **name,
                "kind": "MutatingAdmissionPolicy",
                "spec": {
                    "matchConstraints": {"resourceRules": [{**pods, "operations": ["CREATE"]}]},
                    "matchConditions": [{"name": "large", "expression": large}],
                    "failurePolicy": "Fail",
                    "reinvocationPolicy": "Never",
                    "mutations": [
                        {
                            "patchType": "ApplyConfiguration",
                            "applyConfiguration": {"expression": small},
                        }
                    ],
                },
            },
            {
                **of_policy,
                **name,
                "kind": "MutatingAdmissionPolicyBinding",
                "spec": {"policyName": "small-requests"},
            },
        )

    def _say_logs(self) -> None:
        for node in self.nodes:
            for log in sorted((node.folder / "log").glob("*.log")):
                lines = log.read_text(errors="replace").splitlines()[-8:]
                sys.stderr.write(f"--- {node.name} {log.name}\n" + "\n".join(lines) + "\n")


def condition(thing: Mapping[str, Any], kind: str) -> bool:
    """Whether a condition of an object is True."""
    conditions = thing.get("status", {}).get("conditions", [])
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)


def _answers(node: Node, *command: str) -> bool:
    try:
        node.run(*command)
    except RuntimeError:
        return False
    return True


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
