// A row of PostgreSQL's, with a connection for every thread.
import java.io.IOException;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import jakarta.servlet.http.HttpServlet;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import org.apache.catalina.Context;
import org.apache.catalina.connector.Connector;
import org.apache.catalina.startup.Tomcat;

class Item extends HttpServlet {
    private final ThreadLocal<PreparedStatement> query = ThreadLocal.withInitial(() -> {
        try {
            var address = "jdbc:postgresql://127.0.0.1:@postgres@/postgres?user=postgres&sslmode=disable";
            return DriverManager.getConnection(address).prepareStatement("select name, price from items where id = ?");
        } catch (SQLException error) {
            throw new IllegalStateException(error);
        }
    });

    @Override
    protected void doGet(HttpServletRequest request, HttpServletResponse response) throws IOException {
        int number = Integer.parseInt(request.getPathInfo().substring(1));
        try {
            query.get().setInt(1, number);
            try (ResultSet rows = query.get().executeQuery()) {
                rows.next();
                response.setContentType("application/json");
                response.getWriter().printf("{\"name\": \"%s\", \"price\": %d}", rows.getString(1), rows.getInt(2));
            }
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
        tomcat.setConnector(connector);
        Context context = tomcat.addContext("", "@dir@");
        Tomcat.addServlet(context, "item", new Item());
        context.addServletMappingDecoded("/item/*", "item");
        tomcat.start();
        tomcat.getServer().await();
    }
}
