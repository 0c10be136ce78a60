// Serves a row from PostgreSQL, with as many connections as concurrent requests need. The argument
// names the method of java.util.concurrent.Executors that creates the request threads, instead of
// Tomcat's.
import java.io.IOException;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.Deque;
import java.util.concurrent.ConcurrentLinkedDeque;
import java.util.concurrent.Executor;
import java.util.concurrent.Executors;
import jakarta.servlet.http.HttpServlet;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import org.apache.catalina.Context;
import org.apache.catalina.connector.Connector;
import org.apache.catalina.startup.Tomcat;

class Item extends HttpServlet {
    private final Deque<PreparedStatement> free = new ConcurrentLinkedDeque<>();

    private PreparedStatement take() throws SQLException {
        var query = free.poll();
        if (query != null) {
            return query;
        }
        var address = "jdbc:postgresql://127.0.0.1:@postgres@/postgres?user=postgres&sslmode=disable";
        return DriverManager.getConnection(address).prepareStatement("select name, price from items where id = ?");
    }

    @Override
    protected void doGet(HttpServletRequest request, HttpServletResponse response) throws IOException {
        int number = Integer.parseInt(request.getPathInfo().substring(1));
        try {
            var query = take();
            query.setInt(1, number);
            try (ResultSet rows = query.executeQuery()) {
                rows.next();
                response.setContentType("application/json");
                response.getWriter().printf("{\"name\": \"%s\", \"price\": %d}", rows.getString(1), rows.getInt(2));
            }
            free.push(query);
        } catch (SQLException error) {
            throw new IOException(error);
        }
    }

    public static void main(String[] arguments) throws Exception {
        var tomcat = new Tomcat();
        tomcat.setBaseDir("@dir@");
        var connector = new Connector();
        connector.setPort(@tomcat@);
        connector.setProperty("address", "127.0.0.1");
        connector.setProperty("maxThreads", "64");
        connector.setProperty("maxKeepAliveRequests", "-1");
        if (arguments.length > 0) {
            var executor = (Executor) Executors.class.getMethod(arguments[0]).invoke(null);
            connector.getProtocolHandler().setExecutor(executor);
        }
        tomcat.setConnector(connector);
        Context context = tomcat.addContext("", "@dir@");
        Tomcat.addServlet(context, "item", new Item());
        context.addServletMappingDecoded("/item/*", "item");
        tomcat.start();
        tomcat.getServer().await();
    }
}
