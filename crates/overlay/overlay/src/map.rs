//! The map of containers to hosts: from published entries, or else from the Kubernetes API, or else
//! from the configuration.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::config::{Config, MAX_PORTS};
use crate::workloads::Workload;

/// The map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Map {
    hosts: BTreeMap<String, Place>,
    /// The published host names, by container address.
    containers: HashMap<IpAddr, String>,
    placed: Arc<Placed>,
    /// The host name of each node.
    nodes: HashMap<String, String>,
}

/// The router of a host, and the configured addresses of its containers.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    router: SocketAddr,
    /// The number of its ports.
    ports: u16,
    containers: Vec<IpNet>,
}

/// The entries that hosts have published.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Published {
    /// Their routers, by host name.
    pub(crate) hosts: BTreeMap<String, Router>,
    /// The host name of each container.
    pub(crate) containers: HashMap<IpAddr, String>,
    /// The labels of containers.
    pub(crate) labels: HashMap<IpAddr, Arc<Workload>>,
}

/// The nodes of pods, as the Kubernetes API names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placed {
    /// The address of each node.
    pub(crate) nodes: BTreeMap<String, IpAddr>,
    /// The node of each pod, by the pod's address.
    pub(crate) pods: HashMap<IpAddr, String>,
}

/// A router's address, and the number of ports from its own upwards on which it accepts host
/// connections. Written as 192.168.0.1:7450, or 192.168.0.1:7450-7453.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Router {
    pub(crate) address: SocketAddr,
    pub(crate) ports: u16,
}

impl fmt::Display for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        match self.ports {
            1 => Ok(()),
            ports => write!(f, "-{}", self.address.port() + (ports - 1)),
        }
    }
}

impl FromStr for Router {
    type Err = ();

    fn from_str(text: &str) -> Result<Router, ()> {
        let (address, last) = text.split_once('-').map_or((text, None), |(first, last)| (first, Some(last)));
        let address: SocketAddr = address.parse().map_err(|_| ())?;
        let last = last.map_or(Ok(address.port()), |last| last.parse().map_err(|_| ()))?;
        let ports = last.checked_sub(address.port()).ok_or(())?.saturating_add(1);
        (1..=MAX_PORTS).contains(&ports).then_some(Router { address, ports }).ok_or(())
    }
}

/// A host of the map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) name: String,
    pub(crate) router: SocketAddr,
    pub(crate) ports: u16,
}

impl Map {
    pub(crate) fn new(config: &Config, published: &Published, placed: &Arc<Placed>) -> Map {
        let of_file = config.hosts.iter().map(|host| {
            let place =
                Place { router: host.address, ports: host.ports, containers: host.containers.clone() };
            (host.name.clone(), place)
        });
        let mut hosts: BTreeMap<_, _> = of_file.collect();
        for (name, &Router { address, ports }) in &published.hosts {
            let is_taken =
                hosts.iter().any(|(other, place)| other != name && place.router.ip() == address.ip());
            let is_other_family = hosts.values().any(|place| place.router.is_ipv4() != address.is_ipv4());
            // The configuration decides about this host, and an address belongs to one host only.
            if *name == config.name || is_taken || is_other_family {
                continue;
            }
            let place = hosts.entry(name.clone()).or_insert_with(|| Place {
                router: address,
                ports,
                containers: Vec::new(),
            });
            (place.router, place.ports) = (address, ports);
        }
        let mut nodes = HashMap::new();
        for (node, address) in &placed.nodes {
            let by_address = || hosts.iter().find(|(_, place)| place.router.ip() == *address);
            let known = hosts.get_key_value(node).or_else(by_address).map(|(name, _)| name.clone());
            let name = known.or_else(|| {
                // All nodes have the same ports.
                let own = config.hosts.iter().find(|host| host.name == config.name)?;
                let router = SocketAddr::new(*address, own.address.port());
                let place = Place { router, ports: own.ports, containers: Vec::new() };
                let is_same_family = own.address.is_ipv4() == address.is_ipv4();
                is_same_family.then(|| {
                    hosts.insert(node.clone(), place);
                    node.clone()
                })
            });
            nodes.extend(name.map(|name| (node.clone(), name)));
        }
        Map { hosts, containers: published.containers.clone(), placed: placed.clone(), nodes }
    }

    /// Returns the host that has a container.
    pub(crate) fn host_of(&self, container: IpAddr) -> Option<Known> {
        let has = |place: &Place| place.containers.iter().any(|prefix| prefix.contains(&container));
        let published = self.containers.get(&container).and_then(|name| self.hosts.get_key_value(name));
        let placed = || {
            let node = self.placed.pods.get(&container)?;
            self.hosts.get_key_value(self.nodes.get(node)?)
        };
        let found = published.or_else(placed).or_else(|| self.hosts.iter().find(|(_, place)| has(place)));
        found.map(|(name, place)| Known { name: name.clone(), router: place.router, ports: place.ports })
    }

    /// Returns the host whose router has that address.
    pub(crate) fn at(&self, address: IpAddr) -> Option<Known> {
        let found = self.hosts.iter().find(|(_, place)| place.router.ip() == address);
        found.map(|(name, place)| Known { name: name.clone(), router: place.router, ports: place.ports })
    }

    /// Returns `true` if a router has that address.
    pub(crate) fn has_host(&self, address: IpAddr) -> bool {
        self.hosts.values().any(|place| place.router.ip() == address)
    }

    /// Returns the routers of all hosts except that one.
    pub(crate) fn routers_but(&self, own: &str) -> HashSet<SocketAddr> {
        let others = self.hosts.iter().filter(|(name, _)| *name != own);
        others.map(|(_, place)| place.router).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "name = 'a'\nkey = 'k'\nprefixes = ['10.50.0.0/16']\n\
        [[host]]\nname = 'a'\naddress = '192.168.0.1:7450'\ncontainers = ['10.50.1.0/24']\n\
        [[host]]\nname = 'b'\naddress = '192.168.0.2:7450'\ncontainers = ['10.50.2.0/24']\n";

    #[test]
    fn what_is_published_is_above_what_the_file_says() {
        let config: Config = toml::from_str(FILE).unwrap();
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let hosts = [
            ("a", "192.168.0.9:1"),
            ("b", "192.168.0.2:7451"),
            ("c", "192.168.0.3:7450-7452"),
            ("d", "192.168.0.1:7450"),
            ("e", "[2001:db8::5]:7450"),
        ];
        let containers = [("10.50.2.7", "c"), ("10.50.2.8", "nobody"), ("10.50.9.9", "a")];
        let published = Published {
            hosts: hosts.map(|(name, router)| (name.to_owned(), router.parse().unwrap())).into(),
            containers: containers.map(|(container, name)| (ip(container), name.to_owned())).into(),
            labels: HashMap::new(),
        };
        let of = |map: &Map, container| map.host_of(ip(container)).map(|host| (host.name, host.router));
        let place = |name: &str, router| Some((name.to_owned(), address(router)));
        let file = Map::new(&config, &Published::default(), &Arc::default());
        assert_eq!(of(&file, "10.50.2.7"), place("b", "192.168.0.2:7450"));
        assert_eq!(of(&file, "10.50.9.9"), None);
        let map = Map::new(&config, &published, &Arc::default());
        assert_eq!(of(&map, "10.50.2.7"), place("c", "192.168.0.3:7450"), "it has moved");
        assert_eq!(of(&map, "10.50.2.8"), place("b", "192.168.0.2:7451"), "by nobody who is known");
        assert_eq!(of(&map, "10.50.9.9"), place("a", "192.168.0.1:7450"));
        assert_eq!(map.host_of(ip("10.50.2.7")).unwrap().ports, 3);
        assert!(map.has_host(ip("192.168.0.3")) && !map.has_host(ip("192.168.0.9")));
        let others = map.routers_but("a");
        assert_eq!(others, ["192.168.0.2:7451", "192.168.0.3:7450"].map(address).into());
    }

    #[test]
    fn pods_are_on_the_hosts_of_their_nodes() {
        let config: Config = toml::from_str(FILE).unwrap();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let nodes =
            [("a", "10.9.9.1"), ("node-b", "192.168.0.2"), ("c", "192.168.0.3"), ("six", "2001:db8::6")];
        let pods = [
            ("10.50.2.1", "a"),
            ("10.50.1.2", "node-b"),
            ("10.50.1.3", "c"),
            ("10.50.1.6", "six"),
            ("10.50.2.7", "c"),
        ];
        let placed = Placed {
            nodes: nodes.map(|(name, address)| (name.to_owned(), ip(address))).into(),
            pods: pods.map(|(address, node)| (ip(address), node.to_owned())).into(),
        };
        let published =
            Published { containers: [(ip("10.50.2.7"), "b".to_owned())].into(), ..Published::default() };
        let map = Map::new(&config, &published, &Arc::new(placed));
        let of = |container| map.host_of(ip(container)).map(|host| (host.name, host.router.to_string()));
        let place = |name: &str, router: &str| Some((name.to_owned(), router.to_owned()));
        assert_eq!(of("10.50.2.1"), place("a", "192.168.0.1:7450"), "by the node's name");
        assert_eq!(of("10.50.1.2"), place("b", "192.168.0.2:7450"), "by the node's address");
        assert_eq!(of("10.50.1.3"), place("c", "192.168.0.3:7450"), "no file has the node");
        assert_eq!(of("10.50.1.6"), place("a", "192.168.0.1:7450"), "of another family: the file decides");
        assert_eq!(of("10.50.2.7"), place("b", "192.168.0.2:7450"), "its supervisor is there");
        assert_eq!(of("10.50.2.8"), place("b", "192.168.0.2:7450"));
        let others = ["192.168.0.2:7450", "192.168.0.3:7450"].map(|it| it.parse().unwrap());
        assert_eq!(map.routers_but("a"), others.into());
    }

    #[test]
    fn a_router_is_written_with_its_ports() {
        for (text, ports) in
            [("192.168.0.1:7450", 1), ("192.168.0.1:7450-7453", 4), ("[2001:db8::5]:65472-65535", 64)]
        {
            let router: Router = text.parse().unwrap();
            assert_eq!((router.to_string().as_str(), router.ports), (text, ports));
        }
        assert_eq!("10.0.0.1:7450-7450".parse::<Router>().unwrap().ports, 1);
        for wrong in [
            "",
            "10.0.0.1",
            "10.0.0.1:7450-",
            "10.0.0.1:7450-7449",
            "10.0.0.1:1-65",
            "10.0.0.1:0-65535",
            "10.0.0.1:7-x",
        ] {
            assert!(wrong.parse::<Router>().is_err(), "{wrong}");
        }
    }
}
