// Writes keys to etcd and reads them, through its JSON gateway.
//
//	keys URL CLIENTS GATE
//
// Each client repeats its requests until the file GATE exists.
package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

const patience = 20 * time.Second

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// Sends a request to etcd, and decodes the answer.
func post(client *http.Client, url string, request map[string]string, answer any) {
	body, err := json.Marshal(request)
	check(err)
	response, err := client.Post(url, "application/json", bytes.NewReader(body))
	check(err)
	defer response.Body.Close()
	if response.StatusCode != 200 {
		check(fmt.Errorf("%s: %s", url, response.Status))
	}
	check(json.NewDecoder(response.Body).Decode(answer))
}

func ask(base string, number int, gate string, over chan<- int) {
	client := &http.Client{Timeout: patience, Transport: &http.Transport{}}
	encode := base64.StdEncoding.EncodeToString
	for isOver := false; !isOver; {
		_, err := os.Stat(gate)
		isOver = err == nil
		for turn := 0; turn < 10; turn++ {
			key := encode([]byte(fmt.Sprintf("%d.%d", number, turn)))
			value := encode([]byte(strings.Repeat(fmt.Sprint(turn), 1+turn*397)))
			var put struct{}
			post(client, base+"/v3/kv/put", map[string]string{"key": key, "value": value}, &put)
			var found struct {
				Kvs []struct{ Value string }
			}
			post(client, base+"/v3/kv/range", map[string]string{"key": key}, &found)
			if len(found.Kvs) != 1 || found.Kvs[0].Value != value {
				check(fmt.Errorf("client %d: another value in turn %d", number, turn))
			}
		}
	}
	over <- number
}

func main() {
	clients, err := strconv.Atoi(os.Args[2])
	check(err)
	over := make(chan int)
	for client := 0; client < clients; client++ {
		go ask(os.Args[1], client, os.Args[3], over)
	}
	for left := clients; left > 0; left-- {
		<-over
	}
	fmt.Println("over")
}
