// A backend and a client in Java, with the arguments of main.py.

import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.thrift.TApplicationException;
import org.apache.thrift.protocol.TBinaryProtocol;
import org.apache.thrift.server.TServer;
import org.apache.thrift.server.TThreadPoolServer;
import org.apache.thrift.transport.TServerSocket;
import org.apache.thrift.transport.TSocket;
import org.apache.thrift.transport.TTransport;
import org.apache.thrift.transport.TTransportFactory;
import org.apache.thrift.transport.layered.TFramedTransport;
import peer.Item;
import peer.Peer;
import peer.Refusal;
import peer.Wider;

public class Main {
    static class Backend implements Peer.Iface {
        final String name;
        final Map<String, Integer> notes = new ConcurrentHashMap<>();

        Backend(String name) {
            this.name = name;
        }

        public String whose(int key, String payload) {
            return name + " " + payload;
        }

        public String named(String key, Map<String, List<Item>> items) {
            long sum = 0;
            for (List<Item> list : items.values())
                for (Item item : list)
                    for (long number : item.getNumbers())
                        sum += number;
            return name + " " + sum;
        }

        public String wide(long key) {
            return name;
        }

        public ByteBuffer mirror(int key, ByteBuffer payload) {
            return payload;
        }

        public String fail(int key) throws Refusal {
            throw new Refusal(name, key);
        }

        public void note(int key, String client) {
            notes.merge(key + client, 1, Integer::sum);
        }

        public int noted(int key, String client) {
            return notes.getOrDefault(key + client, 0);
        }

        public String keyless(String payload) {
            return name;
        }
    }

    static void serve(String[] words) throws Exception {
        Peer.Processor<Backend> processor = new Peer.Processor<>(new Backend(words[1]));
        for (int at = 2; at + 1 < words.length; at += 2) {
            InetSocketAddress address = new InetSocketAddress("127.0.0.1", Integer.parseInt(words[at]));
            boolean framed = words[at + 1].equals("framed");
            TServer server = new TThreadPoolServer(new TThreadPoolServer.Args(new TServerSocket(address))
                    .processor(processor)
                    .transportFactory(framed ? new TFramedTransport.Factory() : new TTransportFactory())
                    .protocolFactory(new TBinaryProtocol.Factory()));
            new Thread(server::serve).start();
        }
    }

    static String text(boolean is) {
        return is ? "True" : "False";
    }

    static void call(String client, int port, boolean framed, int keys) throws Exception {
        TTransport transport = new TSocket("127.0.0.1", port);
        if (framed)
            transport = new TFramedTransport(transport);
        transport.open();
        Wider.Client peer = new Wider.Client(new TBinaryProtocol(transport));
        for (int key = 0; key < 3 * keys; key++)
            System.out.println("whose " + key + " " + peer.whose(key, "payload of " + client));
        for (int key = 0; key < keys; key++) {
            Map<String, List<Item>> items = new TreeMap<>();
            for (int at = 0; at < 4; at++) {
                Item item = new Item("" + at, Arrays.asList((long) at, (long) key));
                items.put("" + at, Collections.nCopies(3, item));
            }
            System.out.println("named " + key + " " + peer.named("name-" + key, items));
            System.out.println("wide " + key + " " + peer.wide((long) key << 33));
            for (int at = 0; at < key % 4; at++)
                peer.note(key, client);
            System.out.println("noted " + key + " " + peer.noted(key, client));
            byte[] payload = new byte[key * key * 100];
            for (int at = 0; at < payload.length; at++)
                payload[at] = (byte) (at * 7);
            ByteBuffer answer = peer.mirror(key, ByteBuffer.wrap(payload));
            System.out.println("mirror " + key + " " + text(answer.equals(ByteBuffer.wrap(payload))));
            try {
                peer.fail(key);
            } catch (Refusal refusal) {
                System.out.println("fail " + key + " " + refusal.getWho() + " " + refusal.getCode());
            }
            try {
                peer.keyless("payload");
            } catch (TApplicationException exception) {
                System.out.println("keyless " + exception.getType() + " " + exception.getMessage());
            }
            try {
                peer.unknown(key);
            } catch (TApplicationException exception) {
                System.out.println("unknown " + exception.getType());
            }
        }
        byte[] large = new byte[1_000_000];
        System.out.println("large " + text(peer.mirror(1, ByteBuffer.wrap(large)).equals(ByteBuffer.wrap(large))));
    }

    public static void main(String[] words) throws Exception {
        if (words[0].equals("serve"))
            serve(words);
        else
            call(words[1], Integer.parseInt(words[2]), words[3].equals("framed"), Integer.parseInt(words[4]));
        System.out.flush();
    }
}
